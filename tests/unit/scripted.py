"""A vocabulary of bytes and an engine that follows a script: the worker's HTTP layer without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loraproxy.worker.types import Done, EngineCounters, Event, Generation, SlotView, Timings, Token, TokenProbs

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


class ByteModel:
    """Token ids are the bytes of the text; 256 is a control token written ``<s>``."""

    alias = "bytes"
    path = Path("bytes.gguf")
    ftype = "F32"
    vocab_type = 2
    n_vocab = 257
    n_ctx_train = 64
    n_embd = 8
    n_params = 8
    size = 32
    bos = 256
    eos = 256
    bos_text = "<s>"
    eos_text = "<s>"
    add_bos = True
    chat_template: str | None = CHATML

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        bos = [256] if add_special else []
        if parse_special and text.startswith("<s>"):
            return [*bos, 256, *text[3:].encode()]
        return [*bos, *text.encode()]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token == 256:
            return b"<s>" if special else b""
        return bytes([token])

    def is_eog(self, token: int) -> bool:
        return token == 256


def timings(predicted: int, prompt: int = 3) -> Timings:
    return Timings(cache_n=1, prompt_n=prompt - 1, prompt_ms=2.0, predicted_n=predicted, predicted_ms=4.0)


def spoken(text: str, probs: TokenProbs | None = None) -> list[Event]:
    """The events of a generation that says ``text``, a token for each character, and ends by itself."""
    tokens: list[Event] = [Token(ord(char) % 256, char, probs, timings(n + 1)) for n, char in enumerate(text)]
    return [*tokens, Done("", "eos", "", timings(len(text)), False, "\n" in text, 9)]


class ScriptedEngine:
    """Yields the scripted events; an exception in the script is raised; after the script it waits for ever."""

    n_ctx_slot = 32
    n_slots = 4

    def __init__(self, script: Sequence[Event | Exception] = (), model: ByteModel | None = None) -> None:
        self.model = model or ByteModel()
        self.script = list(script)
        self.seen: list[Generation] = []
        self.running = 0
        self.in_step = 0.0
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def generate(self, generation: Generation) -> AsyncIterator[Event]:
        self.seen.append(generation)
        self.running += 1
        self.started.set()
        try:
            for event in self.script:
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            if not self.running:
                self.ended.set()

    def step_seconds(self) -> float:
        return self.in_step

    def slots(self) -> list[SlotView]:
        busy = SlotView(0, 7, 32, Generation((1, 2)), 2, 1, 5, False, 2, 0)
        return [busy, SlotView(1, -1, 32, None, 0, 0, 0, False)]

    def counters(self) -> EngineCounters:
        return EngineCounters(
            prompt_tokens=10, prompt_seconds=2.0, predicted_tokens=6, predicted_seconds=3.0, decodes=4
        )
