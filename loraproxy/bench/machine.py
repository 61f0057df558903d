"""The machine that was measured, in words."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_INSTRUCTION_SETS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_int8", "asimd", "sve")


def describe_machine() -> list[str]:
    """Lines about processor, memory, system and versions."""
    facts = _cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    sets = [flag for flag in _INSTRUCTION_SETS if flag in flags]
    lines = [f"{name}, {os.cpu_count()} logical CPUs" + (f" ({', '.join(sets)})" if sets else "")]
    if memory := _memory_gib():
        lines.append(f"{memory:.0f} GiB of memory")
    lines.append(f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}")
    lines.append(", ".join(f"{package} {_version(package)}" for package in ("loraproxy", "llama-cpp-python")))
    return lines


def load_average() -> float:
    """Processes that ran over the last minute."""
    return os.getloadavg()[0]


def usable_cpus() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _cpu_facts() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    except (ValueError, OSError):
        return 0.0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        from loraproxy import __version__

        return __version__
