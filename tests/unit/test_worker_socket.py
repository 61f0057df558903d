"""The worker's socket and settings file."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from loraproxy.worker.__main__ import listen, read_settings


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client.connect(str(path))


def test_a_socket_that_a_dead_worker_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    listen(path).close()
    assert path.exists()
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_in_use_and_a_file_are_left_alone(tmp_path: Path) -> None:
    used, file = tmp_path / "worker.sock", tmp_path / "file"
    file.write_text("precious")
    with listen(used), pytest.raises(OSError, match=r"worker\.sock: .*in use"):
        listen(used)
    with pytest.raises(OSError, match=r"file: .*in use"):
        listen(file)
    assert file.read_text() == "precious"


def test_a_socket_path_that_is_too_long_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        listen(tmp_path / ("x" * 120))


def test_settings_that_cannot_be_read_are_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(OSError, match=r"settings\.json"):
        read_settings(path)
    path.write_text('{"model": "m", "socket": "s", "parallel": 0, "nonsense": 1}')
    with pytest.raises(ValueError, match=r"parallel: .*; nonsense: "):
        read_settings(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="Invalid JSON"):
        read_settings(path)
