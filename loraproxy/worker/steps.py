"""One step of the engine: admit, decode, sample, prefill."""

from __future__ import annotations

import logging
import time

from loraproxy import _native
from loraproxy.adapters.sets import BASE
from loraproxy.config import WorkerSettings
from loraproxy.errors import ApiError, InvalidRequest, ServerError
from loraproxy.worker.prefix_cache import Entry, PrefixCache
from loraproxy.worker.runtime import Runtime, StepFailed
from loraproxy.worker.scheduler import DECODE_WEIGHT, PROMPT_WEIGHT, Rows, Scheduler
from loraproxy.worker.sequence import Sequence
from loraproxy.worker.types import Candidate, Done, EngineCounters, Event, Progress, StopReason, Token, TokenProbs

log = logging.getLogger("loraproxy.engine")


class Stepper:
    """Runs steps in the engine's thread and collects their events."""

    def __init__(self, runtime: Runtime, settings: WorkerSettings) -> None:
        self.runtime = runtime
        self.scheduler = Scheduler(runtime.n_slots)
        self.cache = PrefixCache(settings.cache_ram_mib << 20, runtime.prompt_chunk)
        self.counters = EngineCounters()
        self._budget = max(settings.prompt_budget, runtime.prompt_chunk)
        self._events: list[tuple[Sequence, Event | ApiError]] = []

    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return self.scheduler.is_idle()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that asks for another set than a graph worker runs fails instead."""
        graph = self.runtime.graph
        if graph is not None and sequence.generation.adapters != graph.active:
            self._fail(sequence, graph.mismatch(sequence.generation.adapters))
        else:
            self.scheduler.add(sequence)

    def sequences(self) -> list[Sequence]:
        """All sequences, waiting and running."""
        waiting = [s for queue in self.scheduler.waiting.values() for s in queue]
        return self.scheduler.running() + waiting

    def take_events(self) -> list[tuple[Sequence, Event | ApiError]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def step(self) -> None:
        """Cancel who left, admit who waits, decode one token for each, then some prompt chunks."""
        for sequence in self.sequences():
            if sequence.cancelled:
                self._leave(sequence)
        while (admitted := self.scheduler.admit()) is not None:
            self._start(admitted)
        self._close_gaps()
        rows = self.scheduler.rows()
        if rows is not None:
            self._decode(self._with_company(rows))
        for sequence in self.scheduler.prefills(self._budget, self.runtime.prompt_chunk):
            self._prefill(sequence)

    def fail_all(self, error: ApiError) -> None:
        """Every sequence ends with ``error``."""
        for sequence in self.sequences():
            self._fail(sequence, error)

    # -- coming and going ----------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        sequence.started = time.monotonic()
        generation = sequence.generation
        found = self.cache.find(generation.adapters, generation.prompt) if generation.cache_prompt else None
        self.runtime.clear(sequence.slot)
        if found is not None and (self.runtime.rewinds or found[1] == len(found[0].tokens)):
            self._restore(sequence, *found)
        if sequence.sampler.remembers:
            sequence.sampler.see(generation.prompt[-sequence.sampler.remembers :])

    def _restore(self, sequence: Sequence, entry: Entry, length: int) -> None:
        try:
            self.runtime.restore(sequence.slot, entry.state)
        except StepFailed as problem:
            log.warning("event=cache_not_restored reason=%s", problem)
            return  # the prompt is computed from its start
        self.runtime.truncate(sequence.slot, length)
        sequence.n_past = sequence.n_cached = length
        self.counters.prompt_tokens_cached += length

    def _leave(self, sequence: Sequence) -> None:
        sequence.finished = True
        slot = sequence.slot
        self.scheduler.remove(sequence)
        sequence.sampler.close()
        if slot >= 0:
            self.runtime.clear(slot)

    def _fail(self, sequence: Sequence, error: ApiError) -> None:
        self._leave(sequence)
        self._events.append((sequence, error))

    def _close_gaps(self) -> None:
        while (move := self.scheduler.move()) is not None:
            sequence, slot = move
            try:
                self.runtime.restore(slot, self.runtime.save(sequence.slot))
            except StepFailed as problem:
                self._fail(sequence, ServerError(f"the request's KV cells could not be moved: {problem}"))
                continue
            self.runtime.clear(sequence.slot)
            self.scheduler.moved(sequence, slot)

    # -- decoding ------------------------------------------------------------------------------------------

    def _with_company(self, rows: Rows) -> Rows:
        alone = rows.sequences[0]
        if len(rows.sequences) > 1 or alone is None or not self.runtime.needs_company(alone.n_past):
            return rows
        if rows.first + 1 < self.runtime.n_slots:
            return Rows(rows.first, (alone, None))
        return Rows(rows.first - 1, (None, alone))

    def _cells(self, slot: int) -> int:
        """Tokens of ``slot`` that are in the KV cache."""
        sequence = self.scheduler.slots[slot]
        return 0 if sequence is None else sequence.n_past

    def _decode(self, rows: Rows) -> None:
        slots = [(rows.first + i, s) for i, s in enumerate(rows.sequences) if s is not None or self.runtime.rewinds]
        decoding = [(row, s) for row, (_, s) in enumerate(slots) if s is not None]
        filler = decoding[0][1].tokens[-1]
        began = time.monotonic()
        try:
            self.runtime.step_of(
                [filler if s is None else s.tokens[s.n_past] for _, s in slots],
                [self._cells(slot) for slot, _ in slots],
                [slot for slot, _ in slots],
                [[] if s is None else s.native_set for _, s in slots],
            )
        except StepFailed as problem:
            for _, sequence in decoding:
                self._fail(sequence, ServerError(f"decoding failed: {problem}"))
            return
        finally:
            for slot, sequence_or_none in slots:
                if sequence_or_none is None:
                    self.runtime.truncate(slot, self._cells(slot))
        for _, sequence in decoding:
            sequence.n_past += 1
            self.scheduler.charge(sequence, DECODE_WEIGHT)
        self._count_decode(len(decoding))
        self._sample(decoding)
        self.counters.predicted_seconds += time.monotonic() - began

    def _count_decode(self, busy: int) -> None:
        self.counters.decodes += 1
        self.counters.busy_slots += busy
        longest = max((s.n_past for s in self.scheduler.running()), default=0)
        self.counters.n_tokens_max = max(self.counters.n_tokens_max, longest)

    def _prefill(self, sequence: Sequence) -> None:
        chunk, first = self.runtime.prompt_chunk, sequence.n_past
        end = min((first // chunk + 1) * chunk, sequence.n_prompt)
        began = time.monotonic()
        try:
            self.runtime.prefill(
                sequence.slot, sequence.tokens[first:end], first, sequence.native_set, end == sequence.n_prompt
            )
        except StepFailed as problem:
            return self._fail(sequence, ServerError(f"the prompt could not be evaluated: {problem}"))
        sequence.n_past = end
        self.scheduler.charge(sequence, PROMPT_WEIGHT * (end - first))
        self._count_decode(1)
        self._remember(sequence)
        now = time.monotonic()
        self.counters.prompt_tokens += end - first
        self.counters.prompt_seconds += now - began
        if sequence.generation.return_progress:
            elapsed = (now - sequence.started) * 1e3
            self._events.append((sequence, Progress(sequence.n_prompt, sequence.n_cached, end, elapsed)))
        if not sequence.prefilling:
            sequence.prefilled = now
            if sequence.generation.n_predict == 0:
                self._finish(sequence, "limit")
            else:
                self._sample([(-1, sequence)])

    def _remember(self, sequence: Sequence) -> None:
        generation = sequence.generation
        if not generation.cache_prompt or sequence.n_past != self.cache.cut(sequence.n_prompt):
            return
        if self.cache.wants(generation.adapters, generation.prompt):
            self.cache.store(generation.adapters, generation.prompt, self.runtime.save(sequence.slot))

    # -- sampling ------------------------------------------------------------------------------------------

    def _sample(self, rows: list[tuple[int, Sequence]]) -> None:
        rows = [(row, s) for row, s in rows if self._has_logits(row, s)]
        plain = [(row, s) for row, s in rows if not s.generation.post_sampling_probs]
        tokens = _native.sample_rows(
            self.runtime.address,
            [row for row, _ in plain],
            [s.sampler.chain for _, s in plain],
            [s.sampler.grammar for _, s in plain],
            self.runtime.threads,
        )
        for (row, sequence), token in zip(plain, tokens, strict=True):
            if token < 0:
                self._fail(sequence, ServerError("the sampler chain left no token to choose from"))
            else:
                self._append(sequence, token, self._probs(row, sequence, token))
        for row, sequence in rows:
            if sequence.generation.post_sampling_probs:
                self._sample_with_probs(row, sequence)

    def _has_logits(self, row: int, sequence: Sequence) -> bool:
        if self.runtime.is_finite(row):
            return True
        if sequence.generation.adapters == BASE:
            self._fail(sequence, ServerError("the model's output is no finite number; is the model file damaged?"))
        else:
            why = "lora: at these scales the model's output is no finite number; use smaller ones"
            self._fail(sequence, InvalidRequest(why))
        return False

    def _sample_with_probs(self, row: int, sequence: Sequence) -> None:
        sampler, n = sequence.sampler, sequence.generation.n_probs
        try:
            token, prob, top = _native.sample_with_probs(self.runtime.address, row, sampler.chain, sampler.grammar, n)
        except RuntimeError as problem:
            return self._fail(sequence, ServerError(str(problem)))
        chosen, *others = (Candidate.of_prob(t, self._name(t), p) for t, p in [(token, prob), *top])
        probs = TokenProbs(chosen, tuple(others))
        self._append(sequence, token, probs if n > 0 else None)

    def _probs(self, row: int, sequence: Sequence, token: int) -> TokenProbs | None:
        n = sequence.generation.n_probs
        if n <= 0:
            return None
        logprob, top = _native.top_logprobs(self.runtime.address, row, token, n)
        chosen, *others = (Candidate.of_logprob(t, self._name(t), p) for t, p in [(token, logprob), *top])
        return TokenProbs(chosen, tuple(others))

    def _name(self, token: int) -> bytes:
        return self.runtime.model.piece(token, special=True)

    def _append(self, sequence: Sequence, token: int, probs: TokenProbs | None) -> None:
        now = time.monotonic()
        sequence.first_token = sequence.first_token or now
        sequence.last_token = now
        sequence.tokens.append(token)
        self.counters.predicted_tokens += 1
        text = sequence.text.push(self.runtime.model.piece(token))
        reason = sequence.stop_reason(self.runtime.n_ctx_slot, self.runtime.model.is_eog(token))
        self._events.append((sequence, Token(token, text, probs, sequence.timings())))
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: StopReason) -> None:
        limit = sequence.generation.n_predict
        full = sequence.is_full(self.runtime.n_ctx_slot) and not 0 <= limit <= sequence.n_decoded
        self._events.append(
            (
                sequence,
                Done(
                    text=sequence.text.finish(),
                    reason=reason,
                    stopping_word=sequence.text.stopping_word,
                    timings=sequence.timings(),
                    truncated=full and reason == "limit",
                    has_new_line=sequence.text.has_new_line,
                    tokens_cached=sequence.n_past,
                ),
            )
        )
        self._leave(sequence)
