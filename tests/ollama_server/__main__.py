"""``python -m tests.ollama_server --port PORT --models FOLDER --model NAME=GGUF``."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from .generation import Generations
from .models import Models
from .names import Name
from .refusals import refusals
from .runners import Runners
from .store import MODEL, Store

MAX_BODY = 8 << 30


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.ollama_server", description="A stand-in for an Ollama server.")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1 to listen on")
    parser.add_argument("--models", type=Path, required=True, help="folder that holds the models")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=GGUF", help="make this model at the start"
    )
    parser.add_argument("--max-loaded", type=int, default=3, help="models in memory at a time")
    parser.add_argument("--threads", type=int, default=2, help="threads of each model")
    parser.add_argument("--version", default="0.12.6", help="the version that is reported")
    parser.add_argument("--refuse-adapters", action="store_true", help="as Ollama does since 0.34.1")
    return parser.parse_args()


def make_app(options: argparse.Namespace) -> web.Application:
    """The application over the store in ``options.models``."""
    store = Store(options.models)
    for given in options.model:
        text, _, path = given.partition("=")
        name = Name.parse(text)
        if name is None:
            raise SystemExit(f"{text!r} is no model name")
        store.write(name, [store.add_file(Path(path), MODEL)])
    runners = Runners(options.models / "logs", options.max_loaded, options.threads)
    models, generations = Models(store, runners, not options.refuse_adapters), Generations(store, runners)

    async def running(request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": options.version})

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        yield
        await runners.close()

    app = web.Application(middlewares=[refusals], client_max_size=MAX_BODY)
    app.cleanup_ctx.append(lifetime)
    app.add_routes(
        [
            web.get("/", running),
            web.get("/api/version", version),
            web.get("/api/tags", models.tags),
            web.get("/api/ps", models.running),
            web.post("/api/show", models.show),
            web.post("/api/create", models.create),
            web.post("/api/copy", models.copy),
            web.delete("/api/delete", models.delete),
            web.head("/api/blobs/{digest}", models.has_blob),
            web.post("/api/blobs/{digest}", models.add_blob),
            web.post("/api/generate", generations.generate),
            web.post("/api/chat", generations.chat),
            web.post("/api/embed", generations.embed),
            web.post("/api/embeddings", generations.embeddings),
        ]
    )
    return app


if __name__ == "__main__":
    chosen = arguments()
    web.run_app(make_app(chosen), host="127.0.0.1", port=chosen.port, print=None, shutdown_timeout=0.1)
