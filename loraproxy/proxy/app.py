"""The public HTTP application: llama-server's routes and Ollama's, each also under ``/lora/{adapter}``."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from loraproxy.config import HttpConfig
from loraproxy.proxy import adapters_api, control, generate, ollama_api, workers_api
from loraproxy.proxy.context import ADAPTER_PREFIX, PROXY, Proxy
from loraproxy.proxy.middleware import cors, errors_as_json, gate, identified, prepare_headers
from loraproxy.proxy.passthrough import Passthrough

_HANDLERS = {
    ("GET", "/health"): control.health,
    ("GET", "/v1/health"): control.health,
    ("GET", "/metrics"): control.metrics,
    ("GET", "/models"): control.models,
    ("GET", "/v1/models"): control.models,
    ("GET", "/props"): control.pass_on,
    ("GET", "/slots"): control.pass_on,
    ("GET", "/lora-adapters"): control.list_adapters,
    ("POST", "/lora-adapters"): control.set_adapters,
    ("POST", "/tokenize"): control.pass_on,
    ("POST", "/detokenize"): control.pass_on,
    ("POST", "/apply-template"): control.pass_on,
    ("POST", "/completion"): generate.generate,
    ("POST", "/completions"): generate.generate,
    ("POST", "/v1/completions"): generate.generate,
    ("POST", "/chat/completions"): generate.generate,
    ("POST", "/v1/chat/completions"): generate.generate,
}

_NOT_SUPPORTED = (
    ("POST", "/props"),
    ("POST", "/slots/{id_slot}"),
    ("POST", "/infill"),
    ("POST", "/embedding"),
    ("POST", "/embeddings"),
    ("POST", "/v1/embeddings"),
    ("POST", "/rerank"),
    ("POST", "/reranking"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/reranking"),
    ("POST", "/responses"),
    ("POST", "/v1/responses"),
    ("POST", "/responses/input_tokens"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/chat/completions/input_tokens"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/v1/chat/completions/control"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/audio/transcriptions"),
    ("POST", "/v1/audio/transcriptions"),
    ("GET", "/v1/stream"),
    ("DELETE", "/v1/stream"),
    ("POST", "/v1/streams/lookup"),
    ("POST", "/models"),
    ("DELETE", "/models"),
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("GET", "/models/sse"),
    ("GET", "/tools"),
    ("POST", "/tools"),
    ("GET", "/cors-proxy"),
    ("POST", "/cors-proxy"),
)
"""What llama-server has and this server has not: answered 501, so that a client learns why."""


_BEFORE_LLAMA_SERVER = frozenset(
    {
        ("GET", "/metrics"),
        ("GET", "/models"),
        ("GET", "/v1/models"),
        ("GET", "/lora-adapters"),
        ("POST", "/lora-adapters"),
    }
)
"""What is answered here where a llama-server is behind; all else goes through to it."""


def make_app(
    proxy: Proxy,
    config: HttpConfig,
    api_keys: tuple[str, ...],
    admin: adapters_api.AdminState,
    passthrough: Passthrough | None = None,
    instead: Mapping[tuple[str, str], Handler] | None = None,
) -> web.Application:
    """The application. ``proxy`` and ``admin`` are what its handlers work with.

    ``passthrough``: llama-servers are behind, and requests go through to them. ``instead``: handlers, by method and
    path, of the backend behind in place of those that are for every other.
    """
    app = web.Application(
        middlewares=[identified, errors_as_json, cors(config.cors), gate(proxy.pool, api_keys)],
        client_max_size=config.max_body,
    )
    app[PROXY] = proxy
    app[adapters_api.ADMIN] = admin
    app.on_response_prepare.append(prepare_headers(config.cors))
    own = instead or {}
    for prefix in ("", ADAPTER_PREFIX):
        for (method, path), handler in _HANDLERS.items():
            if passthrough is not None and (method, path) not in _BEFORE_LLAMA_SERVER:
                continue
            app.router.add_route(method, prefix + path, handler)
            if method == "GET":  # as llama-server; probes of health ask so
                app.router.add_route("HEAD", prefix + path, handler)
        ollama: dict[tuple[str, str], Handler] = {**ollama_api.HANDLERS, **own}
        for (method, path), answer in ollama.items():
            app.router.add_route(method, prefix + path, answer)
            if method == "GET":  # as Ollama
                app.router.add_route("HEAD", prefix + path, answer)
        for method, path in _NOT_SUPPORTED if passthrough is None else ():
            if (method, path) not in own:
                app.router.add_route(method, prefix + path, control.not_supported)
    if passthrough is None:
        app.router.add_route("HEAD", "/", ollama_api.alive)
    for (method, path), handler in {**adapters_api.HANDLERS, **workers_api.HANDLERS}.items():
        app.router.add_route(method, path, handler)
    for prefix in (ADAPTER_PREFIX, "") if passthrough is not None else ():
        assert passthrough is not None
        app.router.add_route("*", prefix + "/{path:.*}", passthrough.handle)
    return app
