"""A worker that neither ends nor answers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from loraproxy.backends.embedded import EmbeddedWorker, Liveness
from loraproxy.config import WorkerSettings


async def test_a_worker_that_stands_still_is_killed_so_that_it_can_be_replaced(model: Path) -> None:
    settings = WorkerSettings(model=model, socket=Path("worker.sock"), parallel=1, ctx_size=256, threads=1)
    worker = EmbeddedWorker(settings, Liveness(interval=0.1, timeout=2.0, failures=2))
    await worker.start()
    try:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        end = await asyncio.wait_for(worker.wait(), 60)
        assert end.returncode == -signal.SIGKILL
    finally:
        await worker.stop(0)
