"""Starting the product itself: ``loraproxy serve`` and ``loraproxy demo`` as their users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import REPOSITORY, Server, base_model, demo_adapters, free_port, spawn

SMALL = ("--parallel", "4", "--ctx-size", "4096", "--threads", "2")
"""Enough for a test, and quick to start."""


def spawn_proxy(folder: Path, arguments: Sequence[str]) -> Server:
    """Start ``loraproxy ARGUMENTS`` on a free port; it may still be loading. Its runtime folders go into ``folder``."""
    port, log = free_port(), folder / "proxy.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "loraproxy", *arguments, "--port", str(port)]
    return Server(spawn(command, log, environment), log, port=port)


def character_arguments() -> list[str]:
    """``serve`` with the packaged model and the four characters."""
    adapters = [f"--adapter={name}={path}" for name, path in demo_adapters().items()]
    return ["serve", "-m", str(base_model()), "--alias", "smollm2", *adapters, *SMALL]


@contextmanager
def running_proxy(folder: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """A proxy that is ready, ended when the block ends."""
    server = spawn_proxy(folder, arguments)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def run_to_the_end(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command that is to end by itself."""
    command = [sys.executable, "-m", "loraproxy", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of a process's children."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_alive(pid: int) -> bool:
    """Whether there is a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def call(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """One request with a JSON body (or raw bytes): status, headers and the answer, parsed where it is JSON."""
    connection = server.connection()
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        answer = response.read()
        received = {name.lower(): value for name, value in response.getheaders()}
        is_json = received.get("content-type", "").startswith("application/json")
        return response.status, received, json.loads(answer) if is_json else answer.decode()
    finally:
        connection.close()
