"""One llama-server that is started here: its command line, its process, its last words."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loraproxy.backends.base import WorkerExit
from loraproxy.errors import StartFailed
from loraproxy.logs import REQUEST_ID

log = logging.getLogger(__name__)

_LAST_LINES = 20
_LINE_LIMIT = 4096
_HELP_SECONDS = 60
_SLOT_CONTEXT = 4096
_TETHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG (prctl(2)) outlives an exec. Not in a preexec_fn, as this process has threads. SIGKILL, as a
llama-server that is told to end before it is ready, or while it has requests, was seen to wait for itself for ever."""


@dataclass(frozen=True)
class LlamaServerSettings:
    """What a llama-server is started with. Numbers as in its own options; 0: what we or it find best."""

    binary: Path
    model: Path
    alias: str = ""
    parallel: int = 8
    ctx_size: int = 0
    threads: int = 0
    threads_batch: int = 0
    batch_size: int = 2048
    ubatch_size: int = 512
    gpu_layers: int = 0
    cache_ram_mib: int = 512
    mmap: bool = True
    repack: bool = False
    arguments: tuple[str, ...] = ()
    """As they are, after all others."""

    def options(self, loras: Sequence[Path], understood: str) -> list[str]:
        """The command line for adapters at ``loras``, without address. ``understood``: what ``--help`` prints.

        Options of newer llama-servers are left out where an older one would refuse them.
        """
        context = self.ctx_size or _SLOT_CONTEXT * self.parallel
        found = [
            *("--model", str(self.model), "--parallel", str(self.parallel), "--ctx-size", str(context)),
            *("--batch-size", str(self.batch_size), "--ubatch-size", str(self.ubatch_size), "--metrics"),
        ]
        for option, value in (
            ("--alias", self.alias),
            ("--threads", self.threads),
            ("--threads-batch", self.threads_batch),
            ("--n-gpu-layers", self.gpu_layers if self.gpu_layers >= 0 else 999),
        ):
            if value or option == "--n-gpu-layers":
                found += [option, str(value)]
        newer = [("--cache-ram", [str(self.cache_ram_mib)]), ("--slots", [])]
        newer += [] if self.mmap else [("--no-mmap", [])]
        newer += [] if self.repack else [("--no-repack", [])]
        for option, values in newer:
            if option in understood:
                found += [option, *values]
        for lora in loras:
            found += ["--lora", str(lora)]
        return [*found, *(["--lora-init-without-apply"] if loras else []), *self.arguments]


def find_binary(named: Path) -> Path:
    """The program ``named``, on the PATH if it is a bare name. Raises StartFailed."""
    found = shutil.which(named)
    if found is None:
        raise StartFailed(f"--backend-bin: there is no program {named}")
    return Path(found).absolute()


async def understood_options(binary: Path) -> str:
    """What ``--help`` prints. Raises StartFailed where the program does not run."""
    try:
        process = await asyncio.create_subprocess_exec(binary, "--help", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    except OSError as error:
        raise StartFailed(f"{binary} cannot be started: {error.strerror or error}") from error
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _HELP_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode("utf-8", "replace")
    if "--lora" not in text:
        raise StartFailed(f"{binary} is no llama-server with adapters; its --help says: {text[-300:].strip()}")
    return text


class LlamaServerProcess:
    """A process, from its start to its end. Listens on a free port of 127.0.0.1 and asks for ``api_key``."""

    def __init__(self, process: Process, port: int, api_key: str) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self.api_key = api_key
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._output = asyncio.create_task(self._forward_output())

    @classmethod
    async def start(cls, binary: Path, options: Sequence[str], api_key: str) -> LlamaServerProcess:
        """Start it; it may still be loading. Raises StartFailed."""
        port = _free_port()
        try:
            process = await asyncio.create_subprocess_exec(
                *tethered([str(binary), *options, "--host", "127.0.0.1", "--port", str(port)]),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                # in the environment, as everybody on the machine can read command lines
                # its threads, too, are to sleep while others of this machine have the processors (see loraproxy.worker)
                env={"GGML_NO_BACKTRACE": "1", "GOMP_SPINCOUNT": "500", **os.environ, "LLAMA_API_KEY": api_key},
            )
        except OSError as error:
            raise StartFailed(f"{binary} cannot be started: {error.strerror or error}") from error
        log.info("event=spawned pid=%d server=http://127.0.0.1:%d", process.pid, port)
        return cls(process, port, api_key)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> WorkerExit:
        """Return when it has ended and its output was read."""
        returncode = await self._process.wait()
        await asyncio.wait({self._output}, timeout=1)
        return WorkerExit(returncode, tuple(self._last_lines))

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace: float) -> None:
        """SIGTERM, and after ``grace`` seconds SIGKILL."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace)
            except asyncio.TimeoutError:
                self.kill()
                await self._process.wait()
        await asyncio.wait({self._output}, timeout=1)
        self._output.cancel()

    async def _forward_output(self) -> None:
        REQUEST_ID.set("")  # it outlives the request that it was started for
        assert self._process.stdout is not None
        pending = b""
        while data := await self._process.stdout.read(65536):
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > _LINE_LIMIT:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._log_line(line)
        self._log_line(pending)

    def _log_line(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip()
        if text:
            self._last_lines.append(text)
            log.debug("llama-server %d: %s", self.pid, text)


def new_api_key() -> str:
    """A key that nobody else on the machine knows."""
    return secrets.token_urlsafe(24)


def tethered(command: Sequence[str]) -> list[str]:
    """``command`` so that it ends when we are gone, however that was (Linux; elsewhere as it is)."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
