"""A worker whose server is gone before it can look for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loraproxy.config import WorkerSettings


def test_a_worker_whose_server_ended_while_it_started_ends_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    settings = WorkerSettings(model=model, socket=folder / "worker.sock", parallel=2, ctx_size=512, parent=gone.pid)
    (folder / "settings.json").write_text(settings.model_dump_json())
    command = [sys.executable, "-m", "loraproxy.worker", "--settings", str(folder / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "event=parent_gone" in done.stderr
    assert not folder.exists()
