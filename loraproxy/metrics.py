"""Prometheus metrics of the proxy; the worker has llama-server's own (``llamacpp:*``).

Labels are bounded: endpoints, outcomes and states are fixed lists, adapters are the first 200 names that are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loraproxy import __version__

disable_created_metrics()  # type: ignore[no-untyped-call]  # else every series has a twin with the time of its birth

INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the buckets, in seconds; whoever measures counts into these and one more, which has no end."""
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUEUE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LOAD_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MAX_ADAPTER_LABELS = 200


class _CountedHistogram(Collector):
    """A histogram that is fed counts by bucket, many observations at once."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._ends = [*map(floatToGoString, bounds), "+Inf"]
        self._counts = [0] * len(self._ends)
        self._sum = 0.0
        registry.register(self)

    def add(self, counts: Iterable[int], total: float) -> None:
        """``counts``: observations by bucket; ``total``: their sum."""
        self._counts = [have + more for have, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def collect(self) -> Iterable[Metric]:
        """The one histogram."""
        buckets = list(zip(self._ends, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The metrics of one proxy, in a registry of its own."""

    def __init__(self, in_flight: Callable[[], float], restarts: Callable[[], float]) -> None:
        """The two functions are read whenever the metrics are."""
        self._registry = CollectorRegistry()
        self._adapters: set[str] = set()
        self._gauge("build_info", "Always 1; the version is its label", "version").labels(__version__).set(1)
        self._make_requests(in_flight)
        self._make_workers(restarts)
        self._make_adapters()

    def _make_requests(self, in_flight: Callable[[], float]) -> None:
        self._requests = self._counter(
            "requests", "Requests that generate, by endpoint, adapter and outcome", "endpoint", "adapter", "outcome"
        )
        self._seconds = self._histogram(
            "request_seconds", "From a request's arrival to the end of its answer", _REQUEST_BUCKETS, "endpoint"
        )
        self._queue_time = self._histogram(
            "queue_seconds",
            "From a request's arrival until it is sent to a worker that has its adapters loaded",
            _QUEUE_BUCKETS,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to the first bytes of its streamed answer",
            _TTFT_BUCKETS,
        )
        self._inter_token = _CountedHistogram(
            "loraproxy_inter_token_seconds",
            "Between two tokens of a streamed answer; added when the stream ends",
            INTER_TOKEN_BOUNDS,
            self._registry,
        )
        self._tokens = self._counter(
            "tokens",
            "Tokens by adapter and kind: prompt (computed), prompt_cached, generated; added when an answer is complete",
            "adapter",
            "kind",
        )
        self._gauge("requests_in_flight", "Requests that run or wait").set_function(in_flight)
        self._leases = self._gauge("leases_in_flight", "Requests that have a worker")
        self._retries = self._counter("request_retries", "Requests that no worker saw and that went to another")

    def _make_workers(self, restarts: Callable[[], float]) -> None:
        self._gauge("worker_restarts", "Workers replaced since the start").set_function(restarts)
        self._spawns = self._counter("worker_spawns", "Workers started")
        self._deaths = self._counter("worker_deaths", "Workers that ended by themselves or could not start")
        self._drains = self._counter("worker_drains", "Workers that took no new requests, to be changed or ended")
        self._stops = self._counter("worker_stops", "Workers ended after a drain: idle, to make room, or asked to")
        self._changes = self._histogram(
            "worker_change_seconds", "What giving a drained worker another adapter set took", _LOAD_BUCKETS
        )

    def _make_adapters(self) -> None:
        self._loads = self._histogram(
            "adapter_load_seconds", "From the decision to load an adapter until it can be used", _LOAD_BUCKETS
        )
        self._load_failures = self._counter("adapter_load_failures", "Adapters that could not be loaded")
        self._evictions = self._counter("adapter_evictions", "Adapters unloaded to make room for others")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"loraproxy_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"loraproxy_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"loraproxy_{name}", text, labels, buckets=buckets, registry=self._registry)

    # -- workers -------------------------------------------------------------------------------------------

    def watch_workers(self, states: tuple[str, ...], count: Callable[[], Mapping[str, int]]) -> None:
        """Show how many workers are in each of ``states``; ``count`` is read whenever the metrics are."""
        gauge = self._gauge("workers", "Workers by state", "state")
        for state in states:
            gauge.labels(state).set_function(lambda state=state: count().get(state, 0))  # type: ignore[misc]

    def worker_spawned(self) -> None:
        """A worker was started."""
        self._spawns.inc()

    def worker_died(self) -> None:
        """A worker ended by itself."""
        self._deaths.inc()

    def worker_drained(self) -> None:
        """A worker takes no new requests, to be changed or ended."""
        self._drains.inc()

    def worker_stopped(self) -> None:
        """A drained worker is ended."""
        self._stops.inc()

    def worker_changed(self, seconds: float) -> None:
        """A worker runs another adapter set; giving it that took ``seconds``."""
        self._changes.observe(seconds)

    # -- adapters ------------------------------------------------------------------------------------------

    def watch_adapters(
        self, registered: Callable[[], float], resident_bytes: Callable[[], float], waiting: Callable[[], float]
    ) -> None:
        """Show these figures; the functions are read whenever the metrics are."""
        for name, text, function in (
            ("registered", "Adapters that requests can name", registered),
            ("resident_bytes", "Memory of the adapters that are loaded or being loaded", resident_bytes),
            ("waiting_requests", "Requests that wait for memory for their adapters", waiting),
        ):
            self._gauge(f"adapter_{name}", text).set_function(function)

    def adapter_loaded(self, seconds: float) -> None:
        """An adapter was loaded, ``seconds`` after that was decided."""
        self._loads.observe(seconds)

    def adapter_failed(self) -> None:
        """An adapter could not be loaded."""
        self._load_failures.inc()

    def adapter_evicted(self) -> None:
        """An adapter was unloaded to make room."""
        self._evictions.inc()

    # -- requests ------------------------------------------------------------------------------------------

    @contextmanager
    def lease(self) -> Iterator[None]:
        """A request has a worker until the block ends."""
        self._leases.inc()
        try:
            yield
        finally:
            self._leases.dec()

    def retried(self) -> None:
        """A request that no worker saw is tried once more."""
        self._retries.inc()

    def queued(self, seconds: float) -> None:
        """A request is sent to its worker, ``seconds`` after it arrived."""
        self._queue_time.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A streamed answer began, ``seconds`` after its request arrived."""
        self._ttft.observe(seconds)

    def inter_token(self, counts: Sequence[int], seconds: float) -> None:
        """A streamed answer's times between tokens, counted by :data:`INTER_TOKEN_BOUNDS`, and their sum."""
        self._inter_token.add(counts, seconds)

    def finished(self, endpoint: str, adapter: str, outcome: str, seconds: float) -> None:
        """A request ended ``seconds`` after it arrived. ``adapter``: an :meth:`adapter_label`."""
        self._requests.labels(endpoint, adapter, outcome).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def tokens(self, adapter: str, prompt: int, cached: int, generated: int) -> None:
        """A request's tokens: of its prompt computed and taken from the cache, and generated."""
        for kind, count in (("prompt", prompt), ("prompt_cached", cached), ("generated", generated)):
            if count:
                self._tokens.labels(adapter, kind).inc(count)

    def adapter_label(self, adapters: tuple[str, ...] | None) -> str:
        """A label of bounded cardinality for the names a request runs under; None: it named none that can be run.

        One adapter's name, ``base``, or what no adapter can be called: ``(several)``, ``(other)`` beyond the limit,
        ``(unknown)``.
        """
        if adapters is None:
            return "(unknown)"
        if len(adapters) != 1:
            return "(several)" if adapters else "base"
        if adapters[0] not in self._adapters:
            if len(self._adapters) >= _MAX_ADAPTER_LABELS:
                return "(other)"
            self._adapters.add(adapters[0])
        return adapters[0]

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)
