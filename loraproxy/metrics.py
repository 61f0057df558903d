"""Prometheus metrics of the proxy; the worker has llama-server's own (``llamacpp:*``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LOAD_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MAX_ADAPTER_LABELS = 200


class Metrics:
    """The metrics of one proxy, in a registry of its own."""

    def __init__(self, in_flight: Callable[[], float], restarts: Callable[[], float]) -> None:
        """The two functions are read whenever the metrics are."""
        self._registry = CollectorRegistry()
        self._adapters: set[str] = set()
        self._requests = Counter(
            "loraproxy_requests",
            "Requests that generate, by endpoint, adapter and outcome",
            ["endpoint", "adapter", "outcome"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "loraproxy_time_to_first_token_seconds",
            "From a request's arrival to the first bytes of its streamed answer",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        Gauge("loraproxy_requests_in_flight", "Requests that run or wait", registry=self._registry).set_function(
            in_flight
        )
        Gauge("loraproxy_worker_restarts", "Workers replaced since the start", registry=self._registry).set_function(
            restarts
        )

        self._loads = Histogram(
            "loraproxy_adapter_load_seconds",
            "From the decision to load an adapter until it can be used",
            buckets=_LOAD_BUCKETS,
            registry=self._registry,
        )
        self._load_failures = Counter(
            "loraproxy_adapter_load_failures", "Adapters that could not be loaded", registry=self._registry
        )
        self._evictions = Counter(
            "loraproxy_adapter_evictions", "Adapters unloaded to make room for others", registry=self._registry
        )

        self._queue_time = Histogram(
            "loraproxy_queue_seconds",
            "From a request's admission until it has a worker",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._spawns = Counter("loraproxy_worker_spawns", "Workers started", registry=self._registry)
        self._deaths = Counter("loraproxy_worker_deaths", "Workers that ended by themselves", registry=self._registry)
        self._drains = Counter("loraproxy_worker_drains", "Workers drained", registry=self._registry)
        self._changes = Counter(
            "loraproxy_worker_changes", "Workers given another adapter set", registry=self._registry
        )

    def watch_workers(self, states: tuple[str, ...], count: Callable[[], Mapping[str, int]]) -> None:
        """Show how many workers are in each of ``states``; ``count`` is read whenever the metrics are."""
        gauge = Gauge("loraproxy_workers", "Workers by state", ["state"], registry=self._registry)
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

    def worker_changed(self) -> None:
        """A worker runs another adapter set."""
        self._changes.inc()

    def queued(self, seconds: float) -> None:
        """A request has its worker, ``seconds`` after it was admitted."""
        self._queue_time.observe(seconds)

    def watch_adapters(
        self, registered: Callable[[], float], resident_bytes: Callable[[], float], waiting: Callable[[], float]
    ) -> None:
        """Show these figures; the functions are read whenever the metrics are."""
        for name, text, function in (
            ("registered", "Adapters that requests can name", registered),
            ("resident_bytes", "Memory of the adapters that are loaded or being loaded", resident_bytes),
            ("waiting_requests", "Requests that wait for memory for their adapters", waiting),
        ):
            Gauge(f"loraproxy_adapter_{name}", text, registry=self._registry).set_function(function)

    def adapter_loaded(self, seconds: float) -> None:
        """An adapter was loaded, ``seconds`` after that was decided."""
        self._loads.observe(seconds)

    def adapter_failed(self) -> None:
        """An adapter could not be loaded."""
        self._load_failures.inc()

    def adapter_evicted(self) -> None:
        """An adapter was unloaded to make room."""
        self._evictions.inc()

    def count(self, endpoint: str, adapters: tuple[str, ...], outcome: str) -> None:
        """One finished request. ``adapters``: the names it ran under, none for the base."""
        self._requests.labels(endpoint, self._adapter_label(adapters), outcome).inc()

    def first_token(self, seconds: float) -> None:
        """A streamed answer began, ``seconds`` after its request arrived."""
        self._ttft.observe(seconds)

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def _adapter_label(self, adapters: tuple[str, ...]) -> str:
        """A label of bounded cardinality: one adapter's name, ``base``, ``several``, or ``other`` beyond the limit."""
        if len(adapters) != 1:
            return "several" if adapters else "base"
        if adapters[0] not in self._adapters:
            if len(self._adapters) >= _MAX_ADAPTER_LABELS:
                return "other"
            self._adapters.add(adapters[0])
        return adapters[0]
