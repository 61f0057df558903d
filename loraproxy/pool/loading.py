"""Loading into one worker, with the figures that come of it."""

from __future__ import annotations

import logging
from time import perf_counter

from loraproxy.adapters.registry import Version
from loraproxy.backends.adapter_calls import load_adapter, unload_adapter
from loraproxy.backends.base import Backend
from loraproxy.config import WorkerAdapter
from loraproxy.errors import ApiError, WorkerFailed
from loraproxy.metrics import Metrics

log = logging.getLogger(__name__)


class WorkerLoader:
    """A :class:`loraproxy.pool.residency.Loader` for one worker."""

    def __init__(self, backend: Backend, metrics: Metrics, *, ignore_unsupported: bool) -> None:
        self._backend = backend
        self._metrics = metrics
        self._ignore_unsupported = ignore_unsupported

    async def load(self, version: Version) -> int:
        """Have the worker load ``version``; the bytes it takes. Raises ApiError."""
        item = WorkerAdapter(
            id=version.wire_id,
            name=version.name,
            path=version.path,
            digest=version.summary.digest,
            ignore_unsupported=self._ignore_unsupported,
        )
        began = perf_counter()
        try:
            nbytes = await load_adapter(self._backend, item)
        except BaseException:
            self._metrics.adapter_failed()
            raise
        seconds = perf_counter() - began
        self._metrics.adapter_loaded(seconds)
        log.debug("adapter %s: loaded in %.0f ms, %d bytes", version.name, 1e3 * seconds, nbytes)
        return nbytes

    async def unload(self, version: Version, *, evicted: bool) -> None:
        """Return when the memory is free, or the worker gone. ``evicted``: to make room, which is counted."""
        try:
            await unload_adapter(self._backend, version.wire_id)
        except WorkerFailed:
            return  # the memory went with the worker
        except ApiError as error:
            log.error("adapter %s could not be unloaded: %s", version.name, error.message)
            return
        if evicted:
            self._metrics.adapter_evicted()
        log.debug("adapter %s: unloaded", version.name)
