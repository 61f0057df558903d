"""``python -m loraproxy.bench.engine_process SETTINGS``: drive the product's engine in its own process, without HTTP.

SETTINGS is JSON of WorkerSettings. What the product takes longer than this is the cost of its HTTP layers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.bench.wire import Job, StreamJob, StreamTimes, answer_jobs
from loraproxy.config import WorkerSettings
from loraproxy.worker.engine import Engine
from loraproxy.worker.types import Generation, SamplingParams, Token

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


async def _run_stream(engine: Engine, stream: StreamJob, n_predict: int) -> StreamTimes:
    sent = time.perf_counter()
    prompt = engine.model.tokenize(stream.prompt, add_special=True, parse_special=True)
    generation = Generation(
        prompt=tuple(prompt),
        adapters=BASE if stream.adapter is None else AdapterSet.of({stream.adapter: 1.0}),
        sampling=_GREEDY,
        n_predict=n_predict,
        cache_prompt=False,
    )
    arrivals = [time.perf_counter() async for event in engine.generate(generation) if isinstance(event, Token)]
    return StreamTimes(sent=sent, arrivals=tuple(arrivals), n_tokens=len(arrivals), n_prompt=len(prompt))


async def _main(settings: WorkerSettings) -> None:
    engine = Engine.load(settings)

    async def run(job: Job) -> tuple[StreamTimes, ...]:
        streams = (_run_stream(engine, stream, job.n_predict) for stream in job.streams)
        return tuple(await asyncio.gather(*streams))

    try:
        await answer_jobs(run)
    finally:
        engine.close()


if __name__ == "__main__":
    asyncio.run(_main(WorkerSettings.model_validate_json(Path(sys.argv[1]).read_bytes())))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do; llama.cpp's own exit handlers need not run
