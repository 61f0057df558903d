"""Starting the stand-in for Ollama."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servers import Server, free_port, spawn


@dataclass
class OllamaServer(Server):
    """A running stand-in; it is ready when it says so."""

    def is_healthy(self) -> bool:
        """True once it answers."""
        try:
            return self.request("GET", "/")[2] == b"Ollama is running"
        except (OSError, http.client.HTTPException):
            return False


@contextmanager
def running_ollama(folder: Path, models: Mapping[str, Path], *arguments: str) -> Iterator[OllamaServer]:
    """A stand-in that keeps its models in ``folder`` and has ``models`` (name to GGUF file), ended with the block."""
    port, log = free_port(), folder / "ollama.log"
    given = [f"--model={name}={path}" for name, path in models.items()]
    command = [sys.executable, "-m", "tests.ollama_server", "--port", str(port), "--models", str(folder / "models")]
    server = OllamaServer(spawn([*command, *given, *arguments], log), log, port=port)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()
