"""llama.cpp's own quantiser, in a process of its own: one call of it lasts minutes and cannot be interrupted."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from gguf.constants import LlamaFileType

from loraproxy.errors import CommandFailed
from loraproxy.tools.progress import Progress

FILE_TYPES = {
    kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind for kind in LlamaFileType if kind.name != "GUESSED"
}
"""llama-quantize's names of file types, such as Q4_K_M."""

_STEP = re.compile(r"^\[ *(\d+)/ *(\d+)\] *(\S*)")
_BUFFER = 256 << 20


def bits_per_weight(kind: LlamaFileType) -> float:
    """About as many bits as a weight takes in a file of this type, on the high side."""
    name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    if digits := re.search(r"\d+", name):
        bits = int(digits[0])
        return bits if name in ("F32", "F16", "BF16") else bits + 1.5
    return 32


def quantise(source: Path, target: Path, kind: LlamaFileType) -> None:
    """Write ``source`` to ``target`` as ``kind``. Raises CommandFailed with the quantiser's reason."""
    command = [sys.executable, "-m", __name__, str(source), str(target), str(kind.value)]
    said: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            with Progress("quantising", 1000) as progress:
                done = 0
                for line in process.stdout or ():
                    said = [*said[-50:], line.strip()]
                    if step := _STEP.match(line):
                        now = 1000 * int(step[1]) // max(int(step[2]), 1)
                        progress.advance(now - done, step[3])
                        done = now
        except BaseException:  # Ctrl-C: end it before its file is removed
            process.kill()
            raise
    if process.returncode:
        raise CommandFailed(f"llama.cpp cannot write {kind.name.removeprefix('MOSTLY_')}: {_reason(said)}")


def _reason(said: list[str]) -> str:
    """The line among the quantiser's last that tells most."""
    telling = [line for line in said if "failed" in line or "error" in line.lower() or "ASSERT" in line]
    lines = [line for line in said if line]
    return (telling or lines or ["it ended without a word"])[-1]


def _main(source: str, target: str, kind: str) -> int:
    """What the process does: quantise, its log on standard error line by line."""
    import llama_cpp

    llama_cpp.llama_log_set(ctypes.cast(0, llama_cpp.llama_log_callback), ctypes.c_void_p())
    # the C code never looks at Python's own handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(kind)
    params.allow_requantize = True
    params.nthread = 0
    params.max_buf_size = _BUFFER
    code: int = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
