"""Every example of README.md, run as it stands; only the address, and where models and adapters lie, are replaced."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxies import call, running_proxy
from servers import REPOSITORY, Server, demo_adapters

ADDRESS = "127.0.0.1:8080"
TIMEOUT = 300
"""Seconds; machines that run other things take long."""
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A code block, and what the block after it says it prints ("": nothing is said)."""

    language: str
    code: str
    prints: str

    def at(self, server: Server) -> str:
        """The code for a server at another port."""
        return self.code.replace(ADDRESS, f"127.0.0.1:{server.port}")


def examples() -> list[Example]:
    blocks = _FENCE.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    following = [*blocks[1:], ("", "")]
    return [
        Example(language, code, next_code if next_language == "text" and language in ("bash", "python") else "")
        for (language, code), (next_language, next_code) in zip(blocks, following, strict=True)
        if language != "text"
    ]


EXAMPLES = examples()


def those(language: str, start: str) -> list[pytest.ParameterSet]:
    """The examples in a language that start with a word; each is a case, named by its number."""
    return [
        pytest.param(example, id=f"example-{i}")
        for i, example in enumerate(EXAMPLES)
        if example.language == language and example.code.startswith(start)
    ]


def pattern(line: str) -> str:
    """A line of an expected output as a regular expression: … stands for anything."""
    return ".*".join(re.escape(part.strip()) for part in line.split("…"))


def assert_prints(output: str, expected: str) -> None:
    for line in expected.strip().splitlines():
        assert re.search(pattern(line), output), f"{line!r} is not in {output!r}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """``loraproxy demo``, as ``make demo`` starts it; what is uploaded goes into a folder of the test's."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        with running_proxy(folder, ["demo"]) as server:
            yield server


@pytest.fixture
def files(tmp_path: Path, model: Path) -> Path:
    """A folder with the models and adapters that the examples name."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.gguf").symlink_to(model)
    (tmp_path / "adapters").mkdir()
    for name, folder in demo_adapters().items():
        (tmp_path / "adapters" / name).symlink_to(folder)
    return tmp_path


@pytest.fixture
def robot_as_gguf(files: Path, model: Path) -> Path:
    """``files`` with the robot as a GGUF file."""
    from loraproxy.adapters.base_model import BaseModel
    from loraproxy.adapters.gguf_write import write_gguf_adapter
    from loraproxy.adapters.read import read_adapter

    base = BaseModel.from_gguf(model)
    write_gguf_adapter(read_adapter("robot", demo_adapters()["robot"], base), base, files / "adapters" / "robot.gguf")
    return files


def test_every_example_is_run_by_one_of_the_tests_below():
    kinds = [("bash", "make"), ("bash", "curl"), ("bash", "loraproxy serve"), ("bash", "loraproxy inspect")]
    kinds += [("python", ""), ("yaml", "model:")]
    assert sum(len(those(language, start)) for language, start in kinds) == len(EXAMPLES)
    assert all(those(language, start) for language, start in kinds)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("example", those("bash", "make"))
def test_make_knows_the_targets(example):
    command = [*shlex.split(example.code, comments=True), "--dry-run"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("example", those("bash", "curl"))
def test_curl_gets_an_answer(demo, robot_as_gguf, example):
    script = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n' + example.at(demo)
    done = subprocess.run(
        ["bash", "-e", "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=robot_as_gguf
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_prints(done.stdout, example.prints)


@pytest.mark.parametrize("example", those("python", ""))
def test_the_client_prints_what_is_said(demo, example):
    command = [sys.executable, "-c", example.at(demo)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert_prints(done.stdout, example.prints)


@pytest.mark.parametrize("example", those("bash", "loraproxy inspect"))
def test_the_commands_on_files_do_their_work(files, example):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for line in example.code.strip().splitlines():
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=files, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (files / "wizard.gguf").stat().st_size > 0
    assert (files / "pirate-model.gguf").stat().st_size > 0


def adapter_names(server: Server) -> list[str]:
    return [adapter["name"] for adapter in call(server, "GET", "/lora-adapters")[2]]


@pytest.mark.parametrize("example", those("bash", "loraproxy serve"))
def test_the_command_line_serves(robot_as_gguf, example):
    folders = re.compile(r"\b(models|adapters)/")
    arguments = shlex.split(folders.sub(lambda match: f"{robot_as_gguf}{os.sep}{match[0]}", example.code))
    with running_proxy(robot_as_gguf, arguments[1:]) as server:
        assert adapter_names(server) == ["pirate", "robot"]


@pytest.mark.parametrize("example", those("yaml", "model:"))
def test_the_configuration_file_serves(robot_as_gguf, example):
    (robot_as_gguf / "loraproxy.yaml").write_text(example.code)
    with running_proxy(robot_as_gguf, ["serve", "--config", str(robot_as_gguf / "loraproxy.yaml")]) as server:
        assert adapter_names(server) == ["pirate", "robot"]


def test_links_to_files_of_the_repository_lead_somewhere():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("http")]
    assert targets
    assert all((REPOSITORY / target).exists() for target in targets)


def test_the_folders_of_the_table_are_those_of_the_repository():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w/]+/)`", row)
    }
    rooms = {f"loraproxy/{path.parent.name}/" for path in (REPOSITORY / "loraproxy").glob("*/__init__.py")}
    assert rooms <= named
    assert all((REPOSITORY / name).is_dir() for name in named)
