"""What the handlers work with: the adapters, the pool, the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from loraproxy.adapters.names import BASE_WORD
from loraproxy.adapters.registry import AdapterRegistry, Bound
from loraproxy.adapters.selectors import resolve
from loraproxy.adapters.sets import AdapterSet
from loraproxy.errors import AdapterChanged, InvalidAdapterFile, Unavailable, WorkerUnreached
from loraproxy.metrics import Metrics
from loraproxy.pool.base import Leased, Pool
from loraproxy.proxy.catalog import Catalog
from loraproxy.proxy.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proxy:
    """The state that all handlers of one application share."""

    catalog: Catalog
    pool: Pool
    metrics: Metrics
    base_names: frozenset[str]
    """What clients may call the base model."""
    strict_models: bool = False
    worker_metrics: WorkerMetrics = field(default_factory=WorkerMetrics)

    @property
    def registry(self) -> AdapterRegistry:
        """The adapters."""
        return self.catalog.registry

    @asynccontextmanager
    async def lease(self, adapters: AdapterSet) -> AsyncIterator[tuple[Leased, AdapterSet]]:
        """A worker for one request, and its set in the worker's ids: of the versions that are current at the call.

        A version whose file is not what it was by the time it is loaded is replaced by what is there now, once.
        Raises what :meth:`Pool.lease` raises.
        """
        for adapter_id, _ in adapters.entries:
            await self.catalog.retry(self.registry.by_id(adapter_id))
        bound = self.registry.bind(adapters)
        async with AsyncExitStack() as stack:
            try:
                worker = await stack.enter_async_context(self.pool.lease(bound))
            except (AdapterChanged, InvalidAdapterFile) as error:
                if isinstance(error, AdapterChanged):
                    await asyncio.gather(*map(self.catalog.refresh, bound.versions))
                again = self.registry.bind(adapters)
                if again == bound:
                    raise
                bound = again
                worker = await self._lease_again(stack, bound)
            with self.metrics.lease():
                yield worker, bound.adapters

    async def run(
        self, adapters: AdapterSet, send: Callable[[Leased, AdapterSet], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What ``send`` answers with a lease; called once more, on another worker, where it raises WorkerUnreached.

        ``send`` is given the worker and the set in the worker's ids. Raises what it and :meth:`lease` raise.
        """
        try:
            async with self.lease(adapters) as (worker, wire):
                return await send(worker, wire)
        except WorkerUnreached as error:
            self.metrics.retried()
            log.warning("a request is tried on another worker: %s", error.message)
        async with self.lease(adapters) as (worker, wire):
            return await send(worker, wire)

    async def _lease_again(self, stack: AsyncExitStack, bound: Bound) -> Leased:
        try:
            return await stack.enter_async_context(self.pool.lease(bound))
        except AdapterChanged as error:
            raise Unavailable(f"{error.message}, again; try again when it is complete", retry_after=2) from error

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
