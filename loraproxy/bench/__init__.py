"""``loraproxy bench``: the product measured beside a real llama-server, and beside its own engine without HTTP.

``loraproxy bench adapters``: more adapters than memory, and loads beside running streams.
``loraproxy bench keyed``: the memory of several keyed workers on one base model.
``loraproxy bench llama-server``: a llama-server through the proxy, beside the same server asked directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraproxy.bench import churn, command, fronting, keyed
from loraproxy.endings import ends_tidily

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, else the one beside llama-server. Raises StartFailed."""
    measured = {"adapters": churn.main, "keyed": keyed.main, "llama-server": fronting.main}
    named = measured.get(arguments[0]) if arguments else None
    with ends_tidily():  # it has servers
        return named(arguments[1:]) if named else command.main(arguments)
