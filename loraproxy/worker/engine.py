"""The engine: one thread that decodes, and the asynchronous face that the HTTP application talks to.

A step is one decode of all decoding sequences, one token each, then prompt chunks up to a budget, each a
decode of its own. Events of a step are handed to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loraproxy.config import WorkerSetMember, WorkerSettings
from loraproxy.errors import ApiError, Conflict, ContextExceeded, InvalidRequest, ServerError
from loraproxy.worker.graph_lora import GraphLora, StagedAdapter
from loraproxy.worker.heap import give_back_free_memory
from loraproxy.worker.loader import AdapterLoader
from loraproxy.worker.model import Model, ModelLoadError
from loraproxy.worker.runtime import Runtime
from loraproxy.worker.sampling import Sampler
from loraproxy.worker.sequence import Sequence
from loraproxy.worker.steps import Stepper
from loraproxy.worker.types import Done, EngineCounters, Event, Generation, SlotView

if TYPE_CHECKING:  # at run time llama_cpp must come first: delta.py sees to it
    from loraproxy import _native

log = logging.getLogger("loraproxy.engine")

_SHARE_OF_LOADS = 0.3
"""While an adapter loads, a step's tokens come later by this share of the usual time between two."""
_WEIGHT_OF_ONE_STEP = 0.1

_ENDING_SECONDS, _ENDING_CHECKS = 0.5, 25

_Control = Callable[[], Any]


class Engine:
    """A model being served. ``load`` starts its thread, ``close`` ends it."""

    def __init__(self, runtime: Runtime, settings: WorkerSettings) -> None:
        self.model = runtime.model
        self.n_ctx_slot = runtime.n_ctx_slot
        self.n_slots = runtime.n_slots
        self.runtime = runtime
        self._stepper = Stepper(runtime, settings)
        self._inbox: queue.SimpleQueue[Sequence | tuple[_Control, Future[Any]] | None] = queue.SimpleQueue()
        self._task_ids = itertools.count()
        self.loader = AdapterLoader(settings.model, runtime.delta)
        self.adapters: set[int] = set()
        """The ids that new generations may use. The event loop's."""
        self._held: set[int] = set()
        """The ids that are in memory; the event loop adds, the engine's thread removes."""
        self._changing = asyncio.Lock()
        self._leaving: dict[int, Future[None]] = {}
        """Ids that no new generation uses, and who waits until their memory is free. The engine thread's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._step_began = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def load(cls, settings: WorkerSettings) -> Engine:
        """Load the model and its adapters and start the engine. Blocks for as long as that takes.

        Raises ModelLoadError for the model, InvalidAdapterFile for an adapter; both say what is wrong.
        """
        model = Model(
            settings.model,
            alias=settings.alias,
            gpu_layers=settings.gpu_layers,
            use_mmap=settings.use_mmap,
            use_extra_bufts=settings.use_extra_bufts,
        )
        if model.recurrent and settings.lora_mode != "graph":
            raise ModelLoadError(
                f"{settings.model}: recurrent and hybrid models reorder their batches, so adapters could not be told"
                " apart in one; serve it with one adapter set at a time (--lora-mode graph)"
            )
        runtime = Runtime(model, settings)
        engine = cls(runtime, settings)
        for item in settings.adapters:
            runtime.delta.insert(item.id, engine.loader.read(item))
            engine.adapters.add(item.id)
            engine._held.add(item.id)
        engine._thread.start()
        return engine

    # -- generations ---------------------------------------------------------------------------------------

    async def generate(self, generation: Generation) -> AsyncIterator[Event]:
        """Run ``generation``; yields its events, Done last. Leaving early cancels it within one step.

        Raises, before the first event, ContextExceeded or InvalidRequest; later, ServerError if a step failed.
        """
        events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        sequence = await self._built(generation, events)
        for adapter_id, _ in generation.adapters.entries:  # asked last: what is put here comes before any removal
            if adapter_id not in self.adapters:
                raise InvalidRequest(f"adapter {adapter_id} is not loaded")
        self._loop = asyncio.get_running_loop()
        self._inbox.put(sequence)
        try:
            while True:
                event = await events.get()
                if isinstance(event, ApiError):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
        finally:
            if not sequence.finished:
                sequence.cancelled = True
                self._inbox.put(None)

    async def _built(self, generation: Generation, events: asyncio.Queue[Event | ApiError]) -> Sequence:
        """The sequence; one whose sampler takes long to build is built beside the event loop."""
        sampling = generation.sampling
        if sampling.grammar or sampling.dry_multiplier:
            return await asyncio.to_thread(self._sequence, generation, events)
        return self._sequence(generation, events)

    def _sequence(self, generation: Generation, events: asyncio.Queue[Event | ApiError]) -> Sequence:
        n_prompt = len(generation.prompt)
        if n_prompt == 0:
            raise InvalidRequest("the prompt is empty: it has no tokens")
        if n_prompt >= self.n_ctx_slot:
            raise ContextExceeded(n_prompt, self.n_ctx_slot)
        for token in generation.prompt:
            if not 0 <= token < self.model.n_vocab:
                raise InvalidRequest(
                    f"the prompt has token {token}, but token ids run from 0 to {self.model.n_vocab - 1}"
                )
        sampler = Sampler(self.model, generation.sampling, self.n_ctx_slot)
        generation = replace(generation, sampling=sampler.params)
        return Sequence(next(self._task_ids), generation, sampler, events.put_nowait)

    # -- adapters ------------------------------------------------------------------------------------------

    async def change_set(self, members: tuple[WorkerSetMember, ...]) -> int:
        """Have a graph worker run this set, and no other, from now on; the bytes that its adapters take.

        Raises Conflict where something runs, or this is no graph worker; InvalidAdapterFile, AdapterChanged and
        InvalidRequest. The set stays as it was then.
        """
        graph = self.runtime.graph
        if graph is None:
            raise Conflict("this worker applies adapters on the delta path and takes any set with each request")
        async with self._changing:
            await self._until_idle()
            staging = asyncio.ensure_future(self.loader.in_background(lambda: graph.stage(members)))
            try:
                staged = await asyncio.shield(staging)
            except asyncio.CancelledError:
                staging.add_done_callback(_discard)
                raise
            try:
                await self._between_steps(lambda: self._activate(graph, staged))
            finally:
                for adapter in staged:
                    adapter.discard()
            self.adapters = {adapter.member.id for adapter in staged}
            return graph.nbytes

    async def _until_idle(self) -> None:
        """Wait for requests whose clients have just left, which may be known here a little later than there."""
        for _ in range(_ENDING_CHECKS):
            try:
                return await self._between_steps(self._check_idle)
            except Conflict:
                await asyncio.sleep(_ENDING_SECONDS / _ENDING_CHECKS)
        await self._between_steps(self._check_idle)

    def _activate(self, graph: GraphLora, staged: list[StagedAdapter]) -> None:
        self._check_idle()
        graph.activate(staged)
        give_back_free_memory()

    def _check_idle(self) -> None:
        if not self._stepper.is_idle():
            raise Conflict("requests are running under this worker's adapter set; it changes only when they have ended")

    def refuse_unless_shared(self) -> None:
        """Raises Conflict in a graph worker, whose adapters come as a set."""
        if self.runtime.graph is not None:
            raise Conflict("this worker runs one adapter set at a time: PUT /internal/set tells it which")

    def add_adapter(self, adapter_id: int, weights: _native.AdapterWeights) -> None:
        """Make ``weights`` usable as ``adapter_id``. Raises InvalidRequest if it is taken.

        They enter between two steps, which need not be waited for: a generation that is put later comes later.
        """
        if adapter_id in self._held:
            raise InvalidRequest(f"adapter id {adapter_id} is taken")
        self._held.add(adapter_id)
        self.adapters.add(adapter_id)
        self._inbox.put((lambda: self.runtime.delta.insert(adapter_id, weights), Future()))

    async def remove_adapter(self, adapter_id: int) -> None:
        """Refuse new generations under ``adapter_id``, and return when the last running one ended and its memory is
        free. Raises InvalidRequest if it is not loaded.

        What the prompt cache has of it stays until it is the least recently used: the same weights may come back,
        and others never do under this id.
        """
        if adapter_id not in self.adapters:
            raise InvalidRequest(f"adapter {adapter_id} is not loaded")
        self.adapters.discard(adapter_id)
        freed: Future[None] = Future()
        self._inbox.put((lambda: self._leaving.update({adapter_id: freed}), Future()))
        await asyncio.wrap_future(freed)

    async def forget_prompts(self, adapter_id: int) -> None:
        """Drop from the prompt cache what was computed under ``adapter_id``, which will not come back."""
        await self._between_steps(lambda: self._stepper.cache.forget_adapter(adapter_id))

    async def _between_steps(self, control: _Control) -> None:
        done: Future[Any] = Future()
        self._inbox.put((control, done))
        await asyncio.wrap_future(done)

    def _release_adapters(self) -> None:
        used = {i for s in self._stepper.sequences() for i, _ in s.generation.adapters.entries}
        for adapter_id in self._leaving.keys() - used:
            self.runtime.delta.remove(adapter_id)
            self._held.discard(adapter_id)
            freed = self._leaving.pop(adapter_id)
            with suppress(InvalidStateError):  # nobody waits any more
                freed.set_result(None)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        stepper = self._stepper
        usual = 0.0
        while not self._closing:
            self._read_inbox(wait=stepper.is_idle())
            self._step_began = began = time.monotonic()
            try:
                stepper.step()
            except Exception:
                log.exception("event=step_failed")
                stepper.fail_all(ServerError("the engine failed in this step; see the worker's log"))
            if self._leaving:
                self._release_adapters()
            self._step_began = 0.0
            usual += _WEIGHT_OF_ONE_STEP * (time.monotonic() - began - usual)
            self._hand_out()
            if not stepper.is_idle():
                self.loader.give_way(_SHARE_OF_LOADS * usual)
        stepper.fail_all(ServerError("the worker is shutting down"))
        self._hand_out()

    def _read_inbox(self, *, wait: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(message, Sequence):
                self._stepper.add(message)
            elif message is not None:
                _settle(*message)

    def _hand_out(self) -> None:
        batch = self._stepper.take_events()
        if batch and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the event loop is closed: nobody listens any more
                self._closing = True

    # -- views ---------------------------------------------------------------------------------------------

    def slots(self) -> list[SlotView]:
        """The slots, as ``GET /slots`` shows them."""
        return [_view(i, s, self.n_ctx_slot) for i, s in enumerate(list(self._stepper.scheduler.slots))]

    def step_seconds(self) -> float:
        """How long the step that runs now has been running; 0 between steps."""
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    def counters(self) -> EngineCounters:
        """Totals since the start."""
        scheduler = self._stepper.scheduler
        return replace(self._stepper.counters, processing=len(scheduler.running()), deferred=scheduler.n_waiting)

    def close(self) -> None:
        """End the thread and free everything. Generations that still run fail."""
        self._closing = True
        self._inbox.put(None)
        self.loader.close()
        if self._thread.is_alive():
            self._thread.join()
        self.runtime.close()


def _settle(control: _Control, done: Future[Any]) -> None:
    try:
        done.set_result(control())
    except Exception as problem:
        done.set_exception(problem)


def _discard(staging: asyncio.Future[list[StagedAdapter]]) -> None:
    if not staging.cancelled() and staging.exception() is None:
        for adapter in staging.result():
            adapter.discard()


def _deliver(batch: list[tuple[Sequence, Event | ApiError]]) -> None:
    for sequence, event in batch:
        sequence.sink(event)


def _view(slot: int, sequence: Sequence | None, n_ctx: int) -> SlotView:
    if sequence is None:
        return SlotView(slot, -1, n_ctx, None, 0, 0, 0, False)
    return SlotView(
        id=slot,
        id_task=sequence.task_id,
        n_ctx=n_ctx,
        generation=sequence.generation,
        n_prompt_tokens=sequence.n_prompt,
        n_prompt_tokens_processed=max(min(sequence.n_past, sequence.n_prompt) - sequence.n_cached, 0),
        n_prompt_tokens_cache=sequence.n_cached,
        n_decoded=sequence.n_decoded,
        n_remain=sequence.n_remain,
        has_new_line=sequence.text.has_new_line,
    )
