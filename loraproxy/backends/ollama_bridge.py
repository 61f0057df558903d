"""llama-server's API over an Ollama server: the application that the pool sees as one worker, like any other.

It takes what the embedded worker takes (``lora`` in its wire form; adapters loaded and unloaded through
``/internal/adapters``), turns an adapter set into a derived model and a request into one of Ollama's, and gives the
answer llama-server's shape. What Ollama has nothing for is answered with 501.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import survey_adapter
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.backends.ollama_answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    NativeAnswer,
    collected,
    dumps,
    sse_error,
)
from loraproxy.backends.ollama_api import OllamaClient, full_name
from loraproxy.backends.ollama_models import DerivedModels, Member
from loraproxy.backends.ollama_requests import chat_request, completion_request
from loraproxy.config import WorkerAdapter
from loraproxy.errors import AdapterChanged, ApiError, InvalidRequest, NotFound, NotSupported, ServerError, Unavailable

log = logging.getLogger(__name__)

MAX_BODY = 1 << 30
"""The proxy's own limit comes first."""
NDJSON = "application/x-ndjson"
_SELECTORS = ("lora", "adapter_id", "parameters", "name")
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Events = AsyncGenerator[dict[str, Any], None]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors with llama-server's body; paths that are not served have no equivalent in Ollama."""
    try:
        return await handler(request)
    except ApiError as error:
        response = web.json_response(error.body(), status=error.status)
        if isinstance(error, Unavailable) and error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        return response
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        refusal: ApiError = NotSupported(f"{request.method} {request.path} is not supported by the Ollama backend")
    except Exception:
        log.exception("event=bridge_failed path=%s", request.path)
        refusal = ServerError("the Ollama backend failed; see the log")
    return web.json_response(refusal.body(), status=refusal.status)


@dataclass
class Bridge:
    """The handlers, and the adapters that the proxy has loaded."""

    client: OllamaClient
    models: DerivedModels
    base: BaseModel
    model: str
    """The base model's name on the Ollama server."""
    alias: str
    """Its public name."""
    adapters: dict[int, WorkerAdapter] = field(default_factory=dict)
    _digests: dict[int, str] = field(default_factory=dict)
    """Of every adapter there was, since what is kept of it is dropped after it was unloaded."""

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.list_models),
                web.get("/models", self.list_models),
                web.get("/props", self.props),
                web.post("/completion", self.complete),
                web.post("/completions", self.complete),
                web.post("/v1/completions", self.complete_openai),
                web.post("/chat/completions", self.chat),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/embeddings", self.embed),
                web.post("/api/generate", self.as_it_is),
                web.post("/api/chat", self.as_it_is),
                web.post("/api/embed", self.as_it_is),
                web.post("/api/show", self.show),
                web.post("/internal/adapters", self.load),
                web.delete("/internal/adapters/{id}", self.unload),
                web.delete("/internal/adapters/{id}/prompts", self.forget),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        """200 while the Ollama server answers."""
        await self.client.version()
        return web.json_response({"status": "ok"})

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: the base model."""
        about = {"id": self.alias, "aliases": [self.alias], "tags": [], "object": "model", "created": 0}
        meta = {"n_vocab": self.base.n_vocab}
        listed: dict[str, Any] = {"name": self.alias, "model": self.alias, "type": "model"}
        listed["capabilities"] = ["completion"]
        for entry in await self.client.tags():
            if full_name(entry.name) == full_name(self.model):
                listed |= {"size": entry.size, "digest": entry.digest, "details": dict(entry.details)}
        data = [{**about, "owned_by": "ollama", "meta": meta}]
        return web.json_response({"models": [listed], "object": "list", "data": data})

    async def props(self, request: web.Request) -> web.Response:
        """``GET /props``, as far as Ollama says it."""
        shown = await self.client.show(self.model)
        return web.json_response(
            {
                "model_alias": self.alias,
                "model_path": self.model,
                "chat_template": shown.get("template", ""),
                "build_info": f"ollama {await self.client.version()}",
            }
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """``POST /completion``."""
        body = await _body(request)
        asked = completion_request(body, self.model)
        return await self._answer(request, body, asked, self.client.generate, NativeAnswer(asked, self.alias))

    async def complete_openai(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        body = await _body(request)
        asked = completion_request(body, self.model)
        return await self._answer(request, body, asked, self.client.generate, CompletionAnswer(self.alias))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        body = await _body(request)
        asked = chat_request(body, self.model)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return await self._answer(request, body, asked, self.client.chat, ChatAnswer(self.alias, usage))

    async def embed(self, request: web.Request) -> web.Response:
        """``POST /v1/embeddings``."""
        body = await _body(request)
        given = body.get("input")
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
            raise NotSupported("Field 'input' must be a text or an array of texts with the Ollama backend")
        model = await self.models.name_for(self._members(body.get("lora")))
        answer = await self.client.embed({"model": model, "input": given})
        tokens = answer.get("prompt_eval_count", 0)
        vectors = [
            {"object": "embedding", "index": number, "embedding": vector}
            for number, vector in enumerate(answer.get("embeddings") or [])
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"model": self.alias, "object": "list", "usage": usage, "data": vectors})

    async def as_it_is(self, request: web.Request) -> web.StreamResponse:
        """A request of Ollama's own API: everything goes through but ``lora``, and the model, which is the set's.

        Answers carry the model's name as it was asked for.
        """
        body = await _body(request)
        named = {"model": body.get("model", "")}
        asked = {key: value for key, value in body.items() if key not in _SELECTORS}
        path = request.path
        async with aclosing(
            self._events(self._members(body.get("lora")), asked, lambda filled: self.client.ask(path, filled))
        ) as events:
            first = {**await anext(events), **named}
            if path == "/api/embed" or body.get("stream") is False:
                return web.Response(body=dumps(first), content_type="application/json", charset="utf-8")
            response = web.StreamResponse(headers={"Content-Type": NDJSON})
            await response.prepare(request)
            try:
                await response.write(dumps(first) + b"\n")
                async for event in events:
                    await response.write(dumps({**event, **named}) + b"\n")
                await response.write_eof()
            except ApiError as error:
                await response.write_eof(dumps({"error": error.message}) + b"\n")
            except ConnectionError:
                log.debug("event=client_gone path=%s", request.path)
            return response

    async def show(self, request: web.Request) -> web.Response:
        """``POST /api/show`` of the base model, whatever the body names."""
        body = await _body(request)
        return web.json_response(await self.client.show(self.model, verbose=body.get("verbose") is True))

    async def load(self, request: web.Request) -> web.Response:
        """Know an adapter from now on; its model is made when it is first used. Ollama's memory is its own."""
        try:
            item = WorkerAdapter.model_validate(await _body(request))
        except ValidationError as error:
            raise InvalidRequest(str(error)) from None
        kind = Unsupported.LEAVE_OUT if item.ignore_unsupported else Unsupported.REFUSE
        summary = await asyncio.to_thread(survey_adapter, item.name, item.path, self.base, unsupported=kind)
        if item.digest and summary.digest != item.digest:
            raise AdapterChanged(f"adapter {item.name!r} ({item.path}) has changed since it was registered")
        self.adapters[item.id] = item.model_copy(update={"digest": summary.digest})
        self._digests[item.id] = summary.digest
        return web.json_response({"bytes": 0})

    async def unload(self, request: web.Request) -> web.Response:
        """Know an adapter no more; its models stay, in case it comes back."""
        self.adapters.pop(_id(request), None)
        return web.json_response({"success": True})

    async def forget(self, request: web.Request) -> web.Response:
        """Remove the derived models of an adapter that was removed, unless another name has the same content."""
        # one that was never loaded since the start may have models of an earlier run
        digest = self._digests.pop(_id(request), request.query.get("digest"))
        if digest and digest not in self._digests.values():
            try:
                await self.models.remove_adapter(digest)
            except ApiError as error:
                log.warning("event=derived_models_left adapter=%s: %s", digest, error.message)
                raise
        return web.json_response({"success": True})

    def _members(self, lora: Any) -> list[Member]:
        """The set of a ``lora`` field in its wire form. Raises InvalidRequest."""
        members = []
        for entry in lora or ():
            if not isinstance(entry, dict) or not {"id", "scale"} <= entry.keys():
                raise InvalidRequest('Field \'lora\' must be an array of objects with "id" and "scale"')
            item = self.adapters.get(entry["id"])
            if item is None:
                known = ", ".join(map(str, sorted(self.adapters))) or "none"
                raise InvalidRequest(f"Field 'lora': no adapter has the id {entry['id']}; known ids: {known}")
            members.append(Member(item.name, item.path, item.digest, entry["scale"]))
        return members

    async def _answer(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        asked: dict[str, Any],
        ask: Callable[[Mapping[str, Any]], Events],
        answer: Answer,
    ) -> web.StreamResponse:
        async with aclosing(self._events(self._members(body.get("lora")), asked, ask)) as events:
            if not body.get("stream"):
                whole = await collected(answer, events)
                return web.Response(body=dumps(whole), content_type="application/json", charset="utf-8")
            first = await anext(events)  # raises what has a status of its own
            response = web.StreamResponse(headers=_STREAM_HEADERS)
            await response.prepare(request)
            try:
                await response.write(answer.event(first))
                async for event in events:
                    await response.write(answer.event(event))
                await response.write_eof(answer.end)
            except ApiError as error:
                await response.write_eof(sse_error(error))
            except ConnectionError:
                log.debug("event=client_gone path=%s", request.path)
            return response

    async def _events(
        self, members: list[Member], asked: dict[str, Any], ask: Callable[[Mapping[str, Any]], Events]
    ) -> Events:
        """The events of the set's model; a model that the server lost meanwhile is made again, once."""
        for again in (True, False):
            asked["model"] = await self.models.name_for(members)
            began = False
            try:
                async with aclosing(ask(asked)) as events:
                    async for event in events:
                        began = True
                        yield event
                return
            except NotFound:
                if began or not members or not again:
                    raise
                self.models.forget(asked["model"])


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return body


def _id(request: web.Request) -> int:
    text = request.match_info["id"]
    if not text.isdecimal():
        raise InvalidRequest(f"{text!r} is no adapter id")
    return int(text)
