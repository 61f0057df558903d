"""The worker's HTTP application: llama-server's routes on a unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from loraproxy.config import WorkerAdapter, WorkerSet
from loraproxy.errors import ApiError, InvalidRequest, NotFound, NotSupported, PayloadTooLarge, ServerError, Unavailable
from loraproxy.logs import ID_HEADER, REQUEST_ID
from loraproxy.worker import info
from loraproxy.worker.answers import Answer, Job, dumps
from loraproxy.worker.chat import ChatPrompt, chat_to_completion
from loraproxy.worker.completions import JSON_TYPE, run
from loraproxy.worker.fields import Fields, wrong
from loraproxy.worker.native_api import NativeAnswer
from loraproxy.worker.openai_api import ChatAnswer, CompletionAnswer
from loraproxy.worker.params import CompletionParams, parse_params
from loraproxy.worker.prompts import checked_tokens, detokenize, is_token, piece_json, tokenize_mixed, tokenize_prompts
from loraproxy.worker.templates import ChatTemplate
from loraproxy.worker.types import Generation

if TYPE_CHECKING:
    from loraproxy.worker.engine import Engine

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_GENERATIONS = 1024
"""Completions that one request may ask for: its prompts times ``n``."""
MAX_CANDIDATES = 4_000_000
"""Tokens with probabilities that one answer may have; each takes some hundred bytes until it is sent."""
HUNG_SECONDS = 300.0
"""No step takes this long; an ambiguous grammar can."""
QUICK_BODY_BYTES = 16 * 1024
SLOW_FIELDS = ("grammar", "json_schema", "response_format", "logit_bias")
"""A larger body, or one with these fields, is read beside the event loop, which has streams to serve."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNSUPPORTED = (
    ("POST", "/props"),
    ("POST", "/infill"),
    ("POST", "/embedding"),
    ("POST", "/embeddings"),
    ("POST", "/v1/embeddings"),
    ("POST", "/rerank"),
    ("POST", "/reranking"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/reranking"),
    ("POST", "/lora-adapters"),
    ("POST", "/slots/{id_slot}"),
    ("POST", "/v1/responses"),
    ("POST", "/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/chat/completions/control"),
    ("POST", "/chat/completions/input_tokens"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/responses/input_tokens"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/audio/transcriptions"),
    ("GET", "/v1/stream"),
    ("DELETE", "/v1/stream"),
    ("POST", "/v1/streams/lookup"),
    ("GET", "/tools"),
    ("POST", "/tools"),
    ("GET", "/cors-proxy"),
    ("POST", "/cors-proxy"),
)
"""What llama-server has and this server has not: 501 instead of its answer."""


def json_response(value: Any, status: int = 200) -> web.Response:
    """``value`` as llama-server sends JSON."""
    return web.Response(status=status, body=dumps(value), headers={"Content-Type": JSON_TYPE})


def error_response(error: ApiError) -> web.Response:
    """``error`` with its status and body."""
    response = json_response(error.body(), error.status)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """A request's body. Raises InvalidRequest saying where it stops being valid JSON."""
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"parse error at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"parse error: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequest("parse error: a string has a lone surrogate, which is not valid Unicode") from None
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body of ``request``. Raises InvalidRequest or PayloadTooLarge."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise PayloadTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes") from None
    return parse_json_object(raw)


async def read_adapter_item(request: web.Request) -> WorkerAdapter:
    """The adapter that the proxy wants loaded. Raises InvalidRequest."""
    try:
        return WorkerAdapter.model_validate(await read_body(request))
    except ValidationError as error:
        raise InvalidRequest(f"not a WorkerAdapter: {error}") from None


async def read_set(request: web.Request) -> WorkerSet:
    """The adapter set that the proxy wants run. Raises InvalidRequest."""
    try:
        return WorkerSet.model_validate(await read_body(request))
    except ValidationError as error:
        raise InvalidRequest(f"not a WorkerSet: {error}") from None


async def beside_the_loop(request: web.Request, body: Mapping[str, Any], work: Callable[[], T]) -> T:
    """The result of ``work`` on ``body``, computed in a thread where that could take long."""
    quick = len(await request.read()) <= QUICK_BODY_BYTES and not any(body.get(name) for name in SLOW_FIELDS)
    return work() if quick else await asyncio.to_thread(work)


class WorkerApp:
    """The routes of one worker. Until :meth:`serve` gives it an engine, everything answers 503."""

    def __init__(self, adapters: Iterable[WorkerAdapter]) -> None:
        """``adapters``: those that the engine loads before it is given to :meth:`serve`."""
        self._adapters = {adapter.id: adapter for adapter in adapters}
        self._engine: Engine | None = None
        self._template: ChatTemplate | None = None
        self._metrics = info.Metrics()
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        self._add_routes()

    def serve(self, engine: Engine) -> None:
        """Start answering with ``engine``. Raises InvalidRequest if its model's chat template is broken."""
        model = engine.model
        self._template = ChatTemplate(model.chat_template, model.bos_text, model.eos_text, add_bos=model.add_bos)
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine. Raises Unavailable while it loads."""
        if self._engine is None:
            raise Unavailable("Loading model")
        return self._engine

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises Unavailable while the model loads."""
        if self._template is None:
            raise Unavailable("Loading model")
        return self._template

    def _add_routes(self) -> None:
        router = self.app.router
        for path, get in {
            "/health": self.health,
            "/v1/health": self.health,
            "/models": self.models,
            "/v1/models": self.models,
            "/props": self.props,
            "/slots": self.slots,
            "/metrics": self.metrics,
            "/lora-adapters": self.lora_adapters,
        }.items():
            router.add_get(path, get)
        for path, post in {
            "/completion": self.completion,
            "/completions": self.completion,
            "/v1/completions": self.openai_completion,
            "/chat/completions": self.chat,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/apply-template": self.apply_template,
        }.items():
            router.add_post(path, post)
        router.add_put("/internal/set", self.change_set)
        router.add_post("/internal/adapters", self.add_adapter)
        router.add_delete(r"/internal/adapters/{id:\d{1,18}}", self.remove_adapter)
        router.add_delete(r"/internal/adapters/{id:\d{1,18}}/prompts", self.forget_prompts)
        for method, path in UNSUPPORTED:
            router.add_route(method, path, self.unsupported)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into llama-server's body, and refuse everything until the model is loaded."""
        started = time.monotonic()
        REQUEST_ID.set(request.headers.get(ID_HEADER, ""))
        try:
            self.engine  # noqa: B018 (raises while loading)
            response = await handler(request)
        except ApiError as error:
            response = error_response(error)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            response = error_response(NotFound("File Not Found"))
        except web.HTTPException:
            raise
        except Exception:
            logger.exception("event=request_failed method=%s path=%s", request.method, request.path)
            response = error_response(ServerError("internal error; see the worker's log"))
        logger.debug(
            "event=request method=%s path=%s status=%d ms=%.0f",
            request.method,
            request.path,
            response.status,
            1e3 * (time.monotonic() - started),
        )
        return response

    # completions

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /completion``: llama-server's own format."""
        body = await read_body(request)
        generations, params = await beside_the_loop(request, body, lambda: self._prepare(body))
        answer = NativeAnswer(params, self.engine.model.alias, self.engine.model, generations)
        return await self._run(request, generations, params, answer)

    async def openai_completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``: OpenAI's completions."""
        body = await read_body(request)
        for name, harmless in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1,))):
            if body.get(name) is not None and body[name] not in harmless:
                raise NotSupported(f"Field '{name}' is not supported by this server")
        generations, params = await beside_the_loop(request, body, lambda: self._prepare(body))
        return await self._run(request, generations, params, CompletionAnswer(params, self.engine.model.alias))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``: OpenAI's chats."""
        body = await read_body(request)
        chat, generations, params = await beside_the_loop(request, body, lambda: self._prepare_chat(body))
        answer = ChatAnswer(params, self.engine.model.alias, chat.prefill, chat.streamed_prefill)
        return await self._run(request, generations, params, answer)

    def _prepare(self, body: dict[str, Any]) -> tuple[tuple[Generation, ...], CompletionParams]:
        if body.get("prompt") is None:
            raise InvalidRequest('"prompt" is required')
        prompts = tokenize_prompts(self.engine.model, body["prompt"])
        params = parse_params(body, self.engine.model, self._adapters.keys(), self.engine.n_slots)
        if len(prompts) * params.n_cmpl > MAX_GENERATIONS:
            raise InvalidRequest(
                f"the request asks for {len(prompts) * params.n_cmpl} completions; at most {MAX_GENERATIONS} are taken"
            )
        generations = tuple(params.generation(prompt, child) for prompt in prompts for child in range(params.n_cmpl))
        self._check_candidates(generations)
        return generations, params

    def _prepare_chat(self, body: dict[str, Any]) -> tuple[ChatPrompt, tuple[Generation, ...], CompletionParams]:
        chat = chat_to_completion(body, self.template)
        return chat, *self._prepare(chat.body)

    def _check_candidates(self, generations: Sequence[Generation]) -> None:
        room = self.engine.n_ctx_slot
        candidates = sum(one.n_probs * (room if one.n_predict < 0 else min(one.n_predict, room)) for one in generations)
        if candidates > MAX_CANDIDATES:
            raise InvalidRequest(
                f"the answer could have the probabilities of {candidates} tokens, but at most {MAX_CANDIDATES} are"
                " given: lower n_probs (logprobs) or n_predict (max_tokens)"
            )

    async def _run(
        self, request: web.Request, generations: tuple[Generation, ...], params: CompletionParams, answer: Answer
    ) -> web.StreamResponse:
        return await run(request, self.engine, Job(generations, params, answer))

    # text and tokens

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``."""
        body = await read_body(request)
        fields, vocab = Fields(body), self.engine.model
        content = body.get("content")
        if content is None:
            return json_response({"tokens": []})
        add, parse = fields.flag("add_special", False), fields.flag("parse_special", True)

        def work() -> list[int]:
            return tokenize_mixed(vocab, content, "content", add_special=add, parse_special=parse)

        tokens = await beside_the_loop(request, body, work)
        if fields.flag("with_pieces", False):
            pieces = [{"id": token, "piece": piece_json(vocab.piece(token, special=True))} for token in tokens]
            return json_response({"tokens": pieces})
        return json_response({"tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """``POST /detokenize``."""
        body = await read_body(request)
        tokens = body.get("tokens")
        if tokens is None:
            tokens = []
        if not isinstance(tokens, list) or not all(map(is_token, tokens)):
            raise wrong("tokens", "an array of token ids", tokens)
        vocab, checked = self.engine.model, checked_tokens(self.engine.model, tokens, "tokens")
        return json_response({"content": await beside_the_loop(request, body, lambda: detokenize(vocab, checked))})

    async def apply_template(self, request: web.Request) -> web.Response:
        """``POST /apply-template``: the prompt that a chat request would have."""
        body = await read_body(request)
        chat = await beside_the_loop(request, body, lambda: chat_to_completion(body, self.template))
        return json_response({"prompt": chat.body["prompt"]})

    # about the worker

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``: 200 once the model is loaded, unless the engine hangs."""
        seconds = self.engine.step_seconds()
        if seconds > HUNG_SECONDS:
            raise Unavailable(f"the engine has been in one step for {seconds:.0f} s")
        return json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        return json_response(info.models_json(self.engine.model, self.engine.n_ctx_slot))

    async def props(self, request: web.Request) -> web.Response:
        """``GET /props``."""
        engine = self.engine
        return json_response(info.props_json(engine.model, self.template, engine.n_ctx_slot, engine.n_slots))

    async def slots(self, request: web.Request) -> web.Response:
        """``GET /slots``; with ``fail_on_no_slot`` 503 where all are busy."""
        slots = self.engine.slots()
        if request.query.get("fail_on_no_slot") and all(slot.generation is not None for slot in slots):
            raise Unavailable("no slot available")
        return json_response([info.slot_json(slot) for slot in slots])

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics`` for Prometheus."""
        text = self._metrics.scrape(self.engine.counters())
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def lora_adapters(self, request: web.Request) -> web.Response:
        """``GET /lora-adapters``."""
        return json_response(info.adapters_json(tuple(self._adapters.values())))

    async def add_adapter(self, request: web.Request) -> web.Response:
        """``POST /internal/adapters``: load one beside the engine. Answers how many bytes it takes."""
        item = await read_adapter_item(request)
        self.engine.refuse_unless_shared()
        weights = await self.engine.loader.load(item)
        self.engine.add_adapter(item.id, weights)
        self._adapters[item.id] = item
        logger.debug("event=adapter_loaded id=%d name=%s bytes=%d", item.id, item.name, weights.nbytes)
        return json_response({"bytes": weights.nbytes})

    async def remove_adapter(self, request: web.Request) -> web.Response:
        """``DELETE /internal/adapters/{id}``: answered when its memory is free."""
        adapter_id = int(request.match_info["id"])
        self.engine.refuse_unless_shared()
        self._adapters.pop(adapter_id, None)
        await self.engine.remove_adapter(adapter_id)
        return json_response({})

    async def change_set(self, request: web.Request) -> web.Response:
        """``PUT /internal/set``, of a graph worker: answered when it runs this set. Answers how many bytes it takes."""
        wanted = await read_set(request)
        nbytes = await self.engine.change_set(wanted.adapters)
        self._adapters = {member.id: member for member in wanted.adapters}
        logger.info("event=set_changed adapters=%s", ",".join(f"{m.name}={m.scale:.6g}" for m in wanted.adapters))
        return json_response({"bytes": nbytes})

    async def forget_prompts(self, request: web.Request) -> web.Response:
        """``DELETE /internal/adapters/{id}/prompts``: the adapter is gone for good."""
        await self.engine.forget_prompts(int(request.match_info["id"]))
        return json_response({})

    async def unsupported(self, request: web.Request) -> web.Response:
        """Any route that only llama-server has."""
        raise NotSupported(f"{request.method} {request.path} is not supported by this server")
