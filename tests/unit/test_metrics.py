"""Metrics: valid text, bounded labels, what each figure counts."""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from standin import running, soon

from loraproxy.errors import Unavailable
from loraproxy.metrics import INTER_TOKEN_BOUNDS, Metrics
from loraproxy.pool.worker import State
from loraproxy.proxy.accounting import Account, Tokens
from loraproxy.proxy.worker_metrics import WorkerMetrics


def samples(text):
    """Every sample by name and labels, of text that has none twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


async def scraped(bench):
    async with bench.get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return samples(await answer.text())


def value(found, name, **labels):
    return found[(name, *sorted(labels.items()))]


async def settled(bench):
    """The metrics once no request is in flight: a client may have its answer before that is counted."""
    while True:
        found = await scraped(bench)
        if not value(found, "loraproxy_requests_in_flight"):
            return found
        await asyncio.sleep(0)


async def streamed(bench, events=3):
    async with bench.post("/completion", {"lora": "pirate", "wish": "stream"}) as answer:
        for _ in range(events):
            bench.worker.go_on.release()
            await soon(answer.content.readuntil(b"\n\n"))
        assert await answer.read() == b""


async def test_a_streamed_request_is_seen_in_every_histogram(tmp_path):
    async with running(tmp_path) as bench:
        await streamed(bench)
        found = await settled(bench)
        assert value(found, "loraproxy_queue_seconds_count") == 1
        assert value(found, "loraproxy_time_to_first_token_seconds_count") == 1
        assert value(found, "loraproxy_inter_token_seconds_count") == 2
        assert value(found, "loraproxy_inter_token_seconds_bucket", le="+Inf") == 2
        assert 0 < value(found, "loraproxy_inter_token_seconds_sum") < 10
        assert value(found, "loraproxy_request_seconds_count", endpoint="/completion") == 1


async def test_requests_are_counted_by_what_became_of_them(tmp_path):
    async with running(tmp_path) as bench:
        for body in ({"lora": "pirate"}, {"lora": "nobody"}, {"wish": "refuse"}):
            async with bench.post("/completion", body) as answer:
                await answer.read()
        found = await settled(bench)
        for adapter, outcome in (("pirate", "ok"), ("(unknown)", "refused"), ("base", "refused")):
            labels = {"endpoint": "/completion", "adapter": adapter, "outcome": outcome}
            assert value(found, "loraproxy_requests_total", **labels) == 1


async def test_a_stream_that_the_worker_breaks_off_is_an_error_and_a_client_that_leaves_is_cancelled(tmp_path):
    async with running(tmp_path) as bench:
        answer = await bench.post("/completion", {"wish": "stream"})
        bench.worker.go_on.release()
        await soon(answer.content.readuntil(b"\n\n"))
        answer.close()
        await soon(bench.worker.cancelled.wait())
        async with bench.post("/completion", {"wish": "stream"}) as answer:
            bench.worker.go_on.release()
            await soon(answer.content.readuntil(b"\n\n"))
            bench.worker.die()
            assert b"error" in await soon(answer.read())
        await soon(bench.made.acquire())
        found = await settled(bench)
        for outcome in ("cancelled", "error"):
            labels = {"endpoint": "/completion", "adapter": "base", "outcome": outcome}
            assert value(found, "loraproxy_requests_total", **labels) == 1
        assert value(found, "loraproxy_leases_in_flight") == 0


async def test_a_lease_is_counted_while_it_lasts(tmp_path):
    async with running(tmp_path) as bench:
        task = asyncio.create_task(bench.post("/completion", {"wish": "hold"}).__aenter__())
        await soon(bench.worker.arrived.acquire())
        assert value(await scraped(bench), "loraproxy_leases_in_flight") == 1
        bench.worker.go_on.release()
        await (await soon(task)).read()
        assert value(await settled(bench), "loraproxy_leases_in_flight") == 0


async def test_deaths_and_spawns_of_the_worker_are_counted(tmp_path):
    async with running(tmp_path) as bench:
        bench.worker.die()
        await soon(bench.made.acquire())
        await soon(bench.worker.started.wait())
        found = await scraped(bench)
        assert value(found, "loraproxy_worker_spawns_total") == 2
        assert value(found, "loraproxy_worker_deaths_total") == 1


async def test_a_drain_is_counted(tmp_path):
    async with running(tmp_path) as bench:
        assert await bench.pool.drain(0)
        assert value(await scraped(bench), "loraproxy_worker_drains_total") == 1


async def test_the_pool_tells_the_states_of_its_workers(tmp_path):
    async with running(tmp_path) as bench:
        assert bench.pool.states() == {"ready": 1}
        metrics = Metrics(lambda: 0, lambda: 0)
        metrics.watch_workers(tuple(state.value for state in State), bench.pool.states)
        found = samples(metrics.render().decode())
        assert value(found, "loraproxy_workers", state="ready") == 1
        assert value(found, "loraproxy_workers", state="failed") == 0


async def test_servers_behind_one_worker_are_counted_each(tmp_path):
    async with running(tmp_path) as bench:
        bench.worker.states = lambda: {"ready": 2, "failed": 1}
        bench.worker.problem = lambda: "one is down"
        assert bench.pool.states() == {"ready": 2, "failed": 1}


def test_adapters_beyond_the_limit_share_one_label():
    metrics = Metrics(lambda: 0, lambda: 0)
    for number in range(1000):
        metrics.finished("/completion", metrics.adapter_label((f"adapter-{number}",)), "ok", 0.1)
    found = samples(metrics.render().decode())
    counted = [key for key in found if key[0] == "loraproxy_requests_total"]
    assert len(counted) == 201
    assert value(found, "loraproxy_requests_total", endpoint="/completion", adapter="(other)", outcome="ok") == 800


# -- what an account reads out of an answer ------------------------------------------------------------------


def event(value):
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def timings(prompt, cached, generated):
    return {"cache_n": cached, "prompt_n": prompt, "prompt_ms": 1.5, "predicted_n": generated, "predicted_ms": 2.5}


@pytest.fixture
def account():
    return Account(Metrics(lambda: 0, lambda: 0), "/completion")


def test_tokens_are_those_of_the_last_event_of_a_stream(account):
    account.chunk(event({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "x"}}]}))
    last = {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], "timings": timings(7, 3, 11)}
    account.chunk(event(last) + b"data: [DONE]\n\n")
    assert account.tokens == Tokens(7, 3, 11)


def test_tokens_of_several_choices_of_a_stream_are_summed(account):
    for index in (0, 1):
        account.chunk(event({"choices": [{"finish_reason": "stop", "index": index}], "timings": timings(5, 0, 4)}))
    assert account.tokens == Tokens(10, 0, 8)


def test_tokens_with_timings_in_every_event_are_those_of_the_last(account):
    for count in (1, 2, 3):
        account.chunk(event({"index": 0, "content": "x", "stop": False, "timings": timings(5, 1, count)}))
    account.chunk(event({"index": 0, "content": "", "stop": True, "timings": timings(5, 1, 3)}))
    assert account.tokens == Tokens(5, 1, 3)


def test_generated_text_that_looks_like_timings_counts_for_nothing(account):
    text = '"timings":{"cache_n":1,"prompt_n":2,"predicted_n":3}'
    account.chunk(event({"index": 0, "content": text, "stop": False}))
    account.whole(json.dumps({"content": text}).encode())
    assert account.tokens == Tokens()


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"index": 0, "content": "x", "timings": timings(5, 1, 3)}, Tokens(5, 1, 3)),
        ([{"index": i, "timings": timings(5, 1, 3)} for i in range(2)], Tokens(10, 2, 6)),
        (
            {
                "choices": [{"index": 0}, {"index": 1}],
                "usage": {
                    "completion_tokens": 8,
                    "prompt_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
                "timings": timings(5, 1, 4),
            },
            Tokens(10, 2, 8),
        ),
    ],
    ids=["native", "several native", "several choices"],
)
def test_tokens_of_a_whole_answer_are_those_of_all_its_generations(account, answer, tokens):
    account.whole(json.dumps(answer).encode())
    assert account.tokens == tokens


def test_neither_the_last_event_nor_done_is_a_time_between_tokens():
    metrics = Metrics(lambda: 0, lambda: 0)
    account = Account(metrics, "/completion")
    with account.kept():
        for _ in range(3):
            account.chunk(event({"content": "x"}))
        account.chunk(event({"choices": [{"finish_reason": "stop", "index": 0}], "timings": timings(1, 0, 3)}))
        account.chunk(b"data: [DONE]\n\n")
        account.answered(web.Response())
    assert value(samples(metrics.render().decode()), "loraproxy_inter_token_seconds_count") == 2


def test_an_exception_is_the_outcome():
    metrics = Metrics(lambda: 0, lambda: 0)
    with pytest.raises(Unavailable), Account(metrics, "/completion").kept():
        raise Unavailable("full")
    found = samples(metrics.render().decode())
    labels = {"endpoint": "/completion", "adapter": "(unknown)", "outcome": "unavailable"}
    assert value(found, "loraproxy_requests_total", **labels) == 1


def test_times_between_tokens_fall_into_the_buckets_whose_ends_they_do_not_exceed():
    metrics = Metrics(lambda: 0, lambda: 0)
    counts = [0] * (len(INTER_TOKEN_BOUNDS) + 1)
    counts[0], counts[-1] = 2, 1
    metrics.inter_token(counts, 20.0)
    found = samples(metrics.render().decode())
    assert value(found, "loraproxy_inter_token_seconds_bucket", le="0.001") == 2
    assert value(found, "loraproxy_inter_token_seconds_bucket", le="10.0") == 2
    assert value(found, "loraproxy_inter_token_seconds_bucket", le="+Inf") == 3
    assert value(found, "loraproxy_inter_token_seconds_sum") == 20.0


# -- the workers' own ----------------------------------------------------------------------------------------


def worker_text(tokens, largest, busy, processing=1):
    return (
        "# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.\n"
        f"# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total {tokens}\n"
        f"# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max {largest}\n"
        f"# TYPE llamacpp:n_busy_slots_per_decode gauge\nllamacpp:n_busy_slots_per_decode {busy}\n"
        f"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing {processing}\n"
    )


class Worker:
    def __init__(self, session, base_url):
        self.backend = SimpleNamespace(session=session, base_url=base_url)


class Workers:
    """Servers with metrics; a pool as far as these are concerned."""

    def __init__(self, session, url):
        self.texts = {}
        self._session, self._url = session, url
        self._workers = {}

    def reachable(self):
        for name in self.texts:
            self._workers.setdefault(name, Worker(self._session, f"{self._url}/{name}"))
        return [self._workers[name] for name in self.texts]


@pytest.fixture
async def workers():
    async def answer(request):
        text = pool.texts[request.match_info["name"]]
        return web.Response(text=text, status=200 if text else 503)

    app = web.Application()
    app.router.add_get("/{name}/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        pool = Workers(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield pool
    await runner.cleanup()


async def test_the_metrics_of_one_worker_pass_as_they_are(workers):
    workers.texts = {"a": "# what ever\n" + worker_text(5, 7, 1.5)}
    assert (await WorkerMetrics().text(workers)).decode() == workers.texts["a"]


async def test_those_of_several_workers_are_one_each_series_once(workers):
    workers.texts = {"a": worker_text(5, 70, 1.5), "b": worker_text(6, 60, 2.5)}
    found = samples((await WorkerMetrics().text(workers)).decode())
    assert found == {
        ("llamacpp:tokens_predicted_total",): 11,
        ("llamacpp:n_tokens_max_total",): 70,  # the parser's name for a counter without that end
        ("llamacpp:n_busy_slots_per_decode",): 2,
        ("llamacpp:requests_processing",): 2,
    }


async def test_totals_do_not_go_down_when_a_worker_ends_begins_anew_or_is_silent(workers):
    metrics = WorkerMetrics()

    async def total():
        return value(samples((await metrics.text(workers)).decode()), "llamacpp:tokens_predicted_total")

    workers.texts = {"a": worker_text(5, 1, 1), "b": worker_text(6, 1, 1)}
    assert await total() == 11
    workers.texts["b"] = ""
    assert await total() == 11
    workers.texts["b"] = worker_text(7, 1, 1)
    assert await total() == 12
    workers.texts["b"] = worker_text(2, 1, 1)
    assert await total() == 14
    del workers.texts["b"]
    assert await total() == 14
    workers.texts["c"] = worker_text(1, 1, 1)
    assert await total() == 15


async def test_names_of_ours_from_a_server_behind_are_left_out(workers):
    theirs = "# TYPE loraproxy_requests_total counter\nloraproxy_requests_total 3\n"
    workers.texts = {"a": worker_text(5, 7, 1.5) + theirs}
    text = (await WorkerMetrics().text(workers)).decode()
    assert "loraproxy_" not in text
    assert "llamacpp:tokens_predicted_total 5\n" in text


async def test_what_is_no_metric_is_left_out_of_a_sum(workers):
    workers.texts = {"a": worker_text(5, 7, 1), "b": "<html>\nllamacpp:tokens_predicted_total none\n# TYPE\n"}
    found = samples((await WorkerMetrics().text(workers)).decode())
    assert value(found, "llamacpp:tokens_predicted_total") == 5


async def test_without_a_worker_there_are_the_proxys_own(tmp_path):
    async with running(tmp_path) as bench:
        bench.may_start.clear()
        bench.worker.die()
        await soon(bench.made.acquire())
        found = await scraped(bench)
        assert value(found, "loraproxy_worker_deaths_total") == 1
        assert not any(key[0].startswith("llamacpp:") for key in found)
        bench.may_start.set()
