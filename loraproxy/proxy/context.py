"""What the handlers work with: the adapters, the pool, the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from loraproxy.adapters.names import BASE_WORD
from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.adapters.selectors import resolve
from loraproxy.adapters.sets import AdapterSet
from loraproxy.metrics import Metrics
from loraproxy.pool.pool import WorkerPool


@dataclass(frozen=True)
class Proxy:
    """The state that all handlers of one application share."""

    registry: AdapterRegistry
    pool: WorkerPool
    metrics: Metrics
    base_names: frozenset[str]
    """What clients may call the base model."""
    strict_models: bool = False

    def resolve(self, request: web.Request, body: dict[str, Any]) -> AdapterSet:
        """The adapter set of a request that generates. Raises UnknownAdapter and InvalidRequest."""
        return resolve(body, request.match_info.get("adapter"), self.registry, self.base_names, self.strict_models)

    def check_url_adapter(self, request: web.Request) -> None:
        """Raises UnknownAdapter when the URL's ``/lora/{adapter}`` names none; for requests that do not generate."""
        name = request.match_info.get("adapter")
        if name is not None and name != BASE_WORD:
            self.registry.by_name(name)

    def names(self, adapters: AdapterSet) -> dict[int, str]:
        """The names of the adapters in a set, by id and in the set's order."""
        return {adapter_id: self.registry.by_id(adapter_id).name for adapter_id, _ in adapters.entries}


PROXY = web.AppKey("proxy", Proxy)


ADAPTER_PREFIX = "/lora/{adapter}"


def endpoint(request: web.Request) -> str:
    """The route without ``/lora/{adapter}``, as the worker and the metrics know it."""
    resource = request.match_info.route.resource
    assert resource is not None, "only matched requests have handlers that ask"
    return resource.canonical.removeprefix(ADAPTER_PREFIX)
