"""``python -m loraproxy.worker --settings FILE``: one embedded worker, from its settings file to its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from loraproxy.config import WorkerSettings
from loraproxy.errors import ApiError
from loraproxy.logs import set_up_worker
from loraproxy.worker.app import WorkerApp
from loraproxy.worker.engine import Engine
from loraproxy.worker.heap import keep_heap_small

logger = logging.getLogger("loraproxy.worker")

PARENT_CHECK_SECONDS = 0.5
SHUTDOWN_SECONDS = 1.0
"""How long handlers have to end after they were cancelled."""


def read_settings(path: Path) -> WorkerSettings:
    """The settings in ``path``. Raises OSError or ValueError with a readable reason."""
    try:
        return WorkerSettings.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ValueError(f"{path}: {reasons}") from None


def listen(path: Path) -> socket.socket:
    """A listening unix socket at ``path``, which only its owner may use (mode 0600).

    A socket that a dead worker left is replaced. Raises OSError.
    """
    try:
        if stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise OSError(f"{path}: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def load_in_thread(settings: WorkerSettings) -> asyncio.Future[Engine]:
    """Load the engine without holding up the event loop. The thread does not hold up the process's end either."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def load() -> None:
        try:
            engine = Engine.load(settings)
        except Exception as error:
            loop.call_soon_threadsafe(_fail, future, error)
        else:
            loop.call_soon_threadsafe(_succeed, future, engine)

    threading.Thread(target=load, name="load", daemon=True).start()
    return future


def _fail(future: asyncio.Future[Engine], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _succeed(future: asyncio.Future[Engine], engine: Engine) -> None:
    if not future.done():
        future.set_result(engine)


async def end_of_parent(parent: int) -> None:
    """Return when the process ``parent`` is no longer this one's parent. There is no portable event for it."""
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(PARENT_CHECK_SECONDS)
    logger.info("event=parent_gone pid=%d", parent)


def clear_up_for_the_parent(settings_file: Path) -> None:
    """Remove the settings and the folder, if nothing else is in it, as the parent would have done."""
    with suppress(OSError):
        settings_file.unlink()
        settings_file.parent.rmdir()


async def _run(settings_file: Path) -> None:
    """Serve until a signal or the parent's end. Raises what read_settings and :meth:`Engine.load` raise."""
    settings = read_settings(settings_file)
    if settings.lora_mode == "graph":
        keep_heap_small()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    worker = WorkerApp(settings.adapters)
    runner = web.AppRunner(worker.app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    listener = listen(settings.socket)
    orphaned = asyncio.create_task(end_of_parent(settings.parent or os.getppid()))
    ends: list[asyncio.Future[Any]] = [asyncio.create_task(stop.wait()), orphaned]
    engine: Engine | None = None
    try:
        await web.SockSite(runner, listener).start()
        loading = load_in_thread(settings)
        await asyncio.wait([loading, *ends], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            engine = loading.result()
            worker.serve(engine)
            logger.info("event=ready model=%s slots=%d n_ctx=%d", settings.model, engine.n_slots, engine.n_ctx_slot)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        else:
            loading.cancel()
    finally:
        settings.socket.unlink(missing_ok=True)
        if orphaned.done():
            clear_up_for_the_parent(settings_file)
        for task in ends:
            task.cancel()
        await runner.cleanup()
        if engine is not None:
            await asyncio.to_thread(engine.close)
    logger.info("event=stopped")


def main(arguments: list[str] | None = None) -> int:
    """Run a worker; the exit status: 0 after a signal, 1 after ``error: reason`` on stderr."""
    parser = argparse.ArgumentParser(prog="python -m loraproxy.worker", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="JSON of WorkerSettings")
    path = parser.parse_args(arguments).settings
    set_up_worker()
    try:
        asyncio.run(_run(path))
    except (ApiError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {reason}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a load that a signal interrupted still holds its thread inside llama.cpp
