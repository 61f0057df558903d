"""``/api/generate``, ``/api/chat``, ``/api/embed`` and ``/api/embeddings``."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from aiohttp import web

from .bodies import bind, check_options, seconds
from .names import Name
from .refusals import Refusal
from .runners import Runner, Runners, text_of, tokens_of
from .store import MESSAGES, PARAMS, SYSTEM, Model, Store
from .streams import answer

KEEP_ALIVE = 300.0
NUM_CTX = 4096
EMBEDDING = ("--embeddings", "--pooling", "mean")
DEFAULTS: Mapping[str, Any] = {
    "num_keep": 4,
    "seed": -1,
    "num_predict": -1,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "temperature": 0.8,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "num_ctx": NUM_CTX,
    "stop": [],
}
"""api.DefaultOptions, as far as they matter here."""


@dataclass
class Generations:
    """The handlers that run models."""

    store: Store
    runners: Runners

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/generate``."""
        began = time.perf_counter_ns()
        body = await bind(request, "GenerateRequest")
        model = self._found(body)
        keep_alive = seconds(body.get("keep_alive", KEEP_ALIVE))
        prompt = body.get("prompt", "")
        if not prompt and keep_alive == 0:
            await self.runners.unload(model.digest)
            return web.json_response(_about(body, response="", done=True, done_reason="unload"))
        if body.get("raw") and (body.get("template") or body.get("system") or body.get("context")):
            raise Refusal(400, "raw mode does not support template, system, or context")
        _check_capabilities(model, body)
        options = _options(model, body)

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with self.runners.use(model, options["num_ctx"], keep_alive) as runner:
                loaded = time.perf_counter_ns()
                if not prompt:
                    yield _about(body, response="", done=True, done_reason="load")
                    return
                _check_images(body.get("images"))
                full = await _prompt(runner, model, body)
                text = ""
                async with aclosing(_complete(runner, full, options, body)) as parts:
                    async for content, end in parts:
                        text += content
                        if end is None:
                            yield _about(body, response=content, done=False)
                            continue
                        if not body.get("raw"):
                            end["context"] = await tokens_of(runner, full + text)
                        yield _about(body, response=content, done=True, **end, **_durations(began, loaded))

        return await answer(request, events(), body.get("stream", True), ("response",))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/chat``."""
        began = time.perf_counter_ns()
        body = await bind(request, "ChatRequest")
        if Name.parse(body.get("model", "")) is None:
            raise Refusal(400, "model is required")
        model = self._found(body)
        keep_alive = seconds(body.get("keep_alive", KEEP_ALIVE))
        messages = [{**m, "role": m.get("role", "").lower()} for m in body.get("messages", [])]
        if not messages and keep_alive == 0:
            await self.runners.unload(model.digest)
            return web.json_response(_about(body, message=_message(""), done=True, done_reason="unload"))
        _check_capabilities(model, body)
        options = _options(model, body)

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with self.runners.use(model, options["num_ctx"], keep_alive) as runner:
                loaded = time.perf_counter_ns()
                if not messages:
                    yield _about(body, message=_message(""), done=True, done_reason="load")
                    return
                for message in messages:
                    _check_images(message.get("images"))
                full = await _templated(runner, model, messages)
                async with aclosing(_complete(runner, full, options, body)) as parts:
                    async for content, end in parts:
                        about = {"done": False} if end is None else {"done": True, **end, **_durations(began, loaded)}
                        yield _about(body, message=_message(content), **about)

        return await answer(request, events(), body.get("stream", True), ("message", "content"))

    async def embed(self, request: web.Request) -> web.Response:
        """``POST /api/embed``: the vectors have length 1."""
        began = time.perf_counter_ns()
        body = await bind(request, "EmbedRequest")
        given = body.get("input", [])
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Refusal(400, "invalid input type")
        model = self._found(body)
        options, keep_alive = _options(model, body), seconds(body.get("keep_alive", KEEP_ALIVE))
        async with self.runners.use(model, options["num_ctx"], keep_alive, EMBEDDING) as runner:
            loaded = time.perf_counter_ns()
            vectors, count = await _vectors(runner, [text for text in texts if text])
        if width := body.get("dimensions", 0):
            vectors = [_normalised(vector[:width]) for vector in vectors]
        about = {"model": body["model"], "embeddings": vectors, "prompt_eval_count": count}
        return web.json_response({**about, **_durations(began, loaded)})

    async def embeddings(self, request: web.Request) -> web.Response:
        """``POST /api/embeddings``, the older form: one text, the vector as the model gives it."""
        body = await bind(request, "EmbeddingRequest")
        if Name.parse(body.get("model", "")) is None:
            raise Refusal(400, "model is required")
        model = self._found(body)
        options, keep_alive = _options(model, body), seconds(body.get("keep_alive", KEEP_ALIVE))
        async with self.runners.use(model, options["num_ctx"], keep_alive, EMBEDDING) as runner:
            vectors, _ = await _vectors(runner, [body["prompt"]] if body.get("prompt") else [])
        return web.json_response({"embedding": vectors[0] if vectors else []})

    def _found(self, body: Mapping[str, Any]) -> Model:
        name = body.get("model", "")
        if not 0 <= body.get("top_logprobs", 0) <= 20:
            raise Refusal(400, "top_logprobs must be between 0 and 20")
        model = self.store.find(name)
        if model is None:
            raise Refusal(404, f"model '{name}' not found")
        return model


async def _vectors(runner: Runner, texts: list[str]) -> tuple[list[list[float]], int]:
    """A vector of length 1 for each text, and how many tokens all texts have."""
    vectors, count = [], 0
    for text in texts:
        ((found,),) = [one["embedding"] for one in await runner.ask("/embedding", {"content": text})]
        vectors.append(_normalised(found))
        count += len(await tokens_of(runner, text))
    return vectors, count


def _normalised(vector: list[float]) -> list[float]:
    length = max(math.hypot(*vector), 1e-12)
    return [value / length for value in vector]


def _check_capabilities(model: Model, body: Mapping[str, Any]) -> None:
    if body.get("think"):
        if isinstance(body["think"], str):
            raise Refusal(400, f'think value "{body["think"]}" is not supported for this model')
        raise Refusal(400, f'"{body["model"]}" does not support thinking')
    missing = [name for field, name in (("tools", "tools"), ("suffix", "insert")) if body.get(field)]
    if missing:
        raise Refusal(400, f"{model.name} does not support {' '.join(missing)}")
    if body.get("template"):
        raise Refusal(501, "the stand-in has no Go templates")


def _check_images(images: Any) -> None:
    if images:
        raise Refusal(500, "this model is missing data required for image input")


def _options(model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in body.get("options", {}).items() if value is not None}
    check_options(given)
    return {**DEFAULTS, **model.document(PARAMS, {}), **given}


async def _prompt(runner: Runner, model: Model, body: Mapping[str, Any]) -> str:
    prompt = str(body["prompt"])
    if body.get("raw"):
        return prompt
    messages = [] if body.get("context") else model.document(MESSAGES, [])
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    text = await _templated(runner, model, [*system, *messages, {"role": "user", "content": prompt}])
    return (await text_of(runner, body["context"])) + text if body.get("context") else text


async def _templated(runner: Runner, model: Model, messages: list[dict[str, Any]]) -> str:
    system = model.texts(SYSTEM)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system[-1]}, *messages]
    plain = [{"role": m["role"], "content": m.get("content", "")} for m in messages]
    return str((await runner.ask("/apply-template", {"messages": plain}))["prompt"])


async def _complete(
    runner: Runner, prompt: str, options: Mapping[str, Any], body: Mapping[str, Any]
) -> AsyncGenerator[tuple[str, dict[str, Any] | None], None]:
    """Pieces of text, the last with the figures of the end."""
    most = 10 * options["num_ctx"]
    n_predict = int(options["num_predict"])
    request: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": most if not 0 < n_predict <= most else n_predict,
        "n_keep": int(options["num_keep"]),
        "seed": int(options["seed"]),
        "top_k": int(options["top_k"]),
        "repeat_last_n": int(options["repeat_last_n"]),
        "cache_prompt": True,
        **{name: options[name] for name in ("top_p", "min_p", "typical_p", "temperature", "repeat_penalty")},
        **{name: options[name] for name in ("presence_penalty", "frequency_penalty", "stop")},
    }
    if (schema := _schema(body.get("format"))) is not None:
        request["json_schema"] = schema
    async with aclosing(runner.complete(request)) as events:
        async for event in events:
            if not event["stop"]:
                yield event["content"], None
                continue
            timings = event["timings"]
            yield (
                event["content"],
                {
                    "done_reason": "length" if event["stop_type"] == "limit" else "stop",
                    "prompt_eval_count": event["tokens_evaluated"],
                    "prompt_eval_duration": int(timings["prompt_ms"] * 1e6),
                    "eval_count": timings["predicted_n"],
                    "eval_duration": int(timings["predicted_ms"] * 1e6),
                },
            )


def _schema(form: Any) -> Any:
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "object"}
    if not isinstance(form, dict):
        raise Refusal(500, f'invalid format: {form!r}; expected "json" or a valid JSON Schema object')
    return form


def _message(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _about(body: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"model": body["model"], "created_at": now, **fields}


def _durations(began: int, loaded: int) -> dict[str, int]:
    return {"total_duration": time.perf_counter_ns() - began, "load_duration": loaded - began}
