"""The embedded worker: ``python -m loraproxy.worker`` on a unix socket in a private runtime folder."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loraproxy.backends.base import WorkerExit
from loraproxy.config import WorkerSettings
from loraproxy.errors import StartFailed

log = logging.getLogger(__name__)

_SOCKET_PATH_LIMIT = 103
"""Bytes a unix socket's path may have on macOS (104 with the closing zero; 108 on Linux)."""
_HEALTH_INTERVAL = 0.05
_LAST_LINES = 20
_LINE_LIMIT = 4096
_ENVIRONMENT = {
    # ggml would attach a debugger, which may take long and ask the network for symbols
    "GGML_NO_BACKTRACE": "1",
    # glibc: adapters that come and go leave holes in each thread's arena, half as much again as they take themselves
    "MALLOC_ARENA_MAX": "1",
}
_WORKER_RECORD = re.compile(
    r"[\d-]{10} [\d:,.]+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ (.*?)(?: request=([!-~]{1,128}))?"
)
"""A line of the worker's own log; all else is llama.cpp's chatter, for --verbose, or last words."""


@dataclass(frozen=True)
class Liveness:
    """When a worker counts as hung: ``failures`` questions in a row without a good answer within ``timeout`` seconds.

    Several in a row, since one is also missed when the whole machine, or the proxy with its worker, was suspended.
    """

    interval: float = 5.0
    """Seconds between two questions."""
    timeout: float = 10.0
    failures: int = 6


class EmbeddedWorker:
    """One worker process, from its start to its end; not started twice.

    ``settings.socket`` is the socket's file name inside the runtime folder, which exists (mode 0700) from
    ``start`` to ``stop``.
    """

    base_url = "http://worker"

    def __init__(self, settings: WorkerSettings, liveness: Liveness | None = None) -> None:
        self._settings = settings
        self._liveness = liveness or Liveness()
        self._watch: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._process: Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the worker's socket. No limit on their number: the pool bounds the requests."""
        assert self._session is not None, "the worker was not started"
        return self._session

    @property
    def pid(self) -> int | None:
        """The process id, once it was started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and wait until it is healthy. Raises StartFailed with its last words if it ends first."""
        self._folder = _make_runtime_folder(self._settings.socket.name)
        socket = self._folder / self._settings.socket.name
        settings_file = self._folder / "settings.json"
        settings = self._settings.model_copy(update={"socket": socket, "parent": os.getpid()})
        _write_private(settings_file, settings.model_dump_json())
        # In a session of its own, so that Ctrl-C in a terminal reaches the proxy alone, which then drains.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "loraproxy.worker", "--settings", str(settings_file)),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            env={**_ENVIRONMENT, **os.environ},
        )
        self._output = asyncio.create_task(self._forward_output(self._process))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        await self._until_healthy()
        self._watch = asyncio.create_task(self._kill_when_hung(self._process))

    async def wait(self) -> WorkerExit:
        """Return when the process has ended and its output was read."""
        assert self._process is not None
        assert self._output is not None
        returncode = await self._process.wait()
        await asyncio.wait({self._output}, timeout=1)
        return WorkerExit(returncode, tuple(self._last_lines))

    async def stop(self, grace: float) -> None:
        """SIGTERM, after ``grace`` seconds SIGKILL; then close the connections and remove the runtime folder."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace)
            except asyncio.TimeoutError:
                if grace:
                    log.warning("the worker (pid %d) did not end within %g s of SIGTERM; killing it", self.pid, grace)
                else:
                    log.info("ending the worker (pid %d) at once", self.pid)
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._output is not None:
            await asyncio.wait({self._output}, timeout=1)
            self._output.cancel()
        if self._session is not None:
            await self._session.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _until_healthy(self) -> None:
        ended = asyncio.create_task(self.wait())
        try:
            while not await self._healthy():
                await asyncio.wait({ended}, timeout=_HEALTH_INTERVAL)
                if ended.done():
                    raise StartFailed(f"the worker ended while it was starting: {self._explain(ended.result())}")
        finally:
            ended.cancel()

    async def _healthy(self) -> bool:
        try:
            async with self.session.get(f"{self.base_url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def _kill_when_hung(self, process: Process) -> None:
        """End a worker that does not answer, so that ``wait`` returns and it is replaced: its requests would hang."""
        failures = 0
        while failures < self._liveness.failures:
            await asyncio.sleep(self._liveness.interval)
            try:
                healthy = await asyncio.wait_for(self._healthy(), self._liveness.timeout)
            except asyncio.TimeoutError:
                healthy = False
            failures = 0 if healthy else failures + 1
        log.error("the worker (pid %d) hangs: %d times in a row it was not healthy; killing it", process.pid, failures)
        with suppress(ProcessLookupError):
            process.kill()

    def _explain(self, end: WorkerExit) -> str:
        hint = "\nllama.cpp's repacked kernels crash on some machines: try without --repack (engine.repack: false)"
        return end.report() + (hint if end.returncode < 0 and self._settings.use_extra_bufts else "")

    async def _forward_output(self, process: Process) -> None:
        """Copy the worker's output into our log, a line at a time, and keep the last lines."""
        assert process.stdout is not None
        pending = b""
        while data := await process.stdout.read(65536):
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > _LINE_LIMIT:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._log_line(line)
        if pending:
            self._log_line(pending)

    def _log_line(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip()
        if text:
            self._last_lines.append(text)
            if match := _WORKER_RECORD.fullmatch(text):
                log.log(int(getattr(logging, match[1])), "worker: %s", match[2], extra={"request_id": match[3] or ""})
            else:
                log.debug("worker: %s", text)


def _make_runtime_folder(socket_name: str) -> Path:
    """A new folder of mode 0700 whose path leaves room for a unix socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="loraproxy-"))
    if len(os.fsencode(folder / socket_name)) <= _SOCKET_PATH_LIMIT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="loraproxy-", dir="/tmp"))


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
