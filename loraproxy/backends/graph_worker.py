"""The embedded worker that uses llama.cpp's own LoRA graph: a keyed worker, which runs one adapter set at a time."""

from __future__ import annotations

from loraproxy.adapters.registry import Bound
from loraproxy.backends.adapter_calls import change_set
from loraproxy.backends.embedded import EmbeddedWorker, Liveness
from loraproxy.config import WorkerSet, WorkerSetMember, WorkerSettings


class GraphWorker(EmbeddedWorker):
    """One worker process with ``--lora-mode graph``; a :class:`loraproxy.backends.base.KeyedBackend`.

    Several on one base model share its file's pages. It starts with the base model, and refuses every generation
    whose ``lora`` is not the set that it was last changed to.
    """

    def __init__(
        self, settings: WorkerSettings, liveness: Liveness | None = None, *, ignore_unsupported: bool = False
    ) -> None:
        """``settings`` as an embedded worker's; its adapters and mode are replaced.

        ignore_unsupported: apply the rest of adapters that have unsupported parts.
        """
        keyed = settings.model_copy(update={"lora_mode": "graph", "adapters": ()})
        super().__init__(keyed, liveness)
        self._ignore_unsupported = ignore_unsupported

    async def change(self, bound: Bound) -> None:
        """Return when it runs ``bound`` and nothing else; errors are those of KeyedBackend."""
        scales = dict(bound.adapters.entries)
        members = tuple(
            WorkerSetMember(
                id=version.wire_id,
                name=version.name,
                path=version.path,
                digest=version.summary.digest,
                ignore_unsupported=self._ignore_unsupported,
                scale=scales[version.wire_id],
            )
            for version in bound.versions
        )
        await change_set(self, WorkerSet(adapters=members))
