"""``loraproxy bench``: the product measured beside a real llama-server, and beside its own engine without HTTP.

``loraproxy bench adapters``: more adapters than memory, and loads beside running streams.
``loraproxy bench keyed``: the memory of several keyed workers on one base model.
``loraproxy bench llama-server``: a llama-server through the proxy, beside the same server asked directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraproxy.bench import churn, command, fronting, keyed

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, else the one beside llama-server. Raises StartFailed."""
    if arguments and arguments[0] == "adapters":
        return churn.main(arguments[1:])
    if arguments and arguments[0] == "keyed":
        return keyed.main(arguments[1:])
    if arguments and arguments[0] == "llama-server":
        return fronting.main(arguments[1:])
    return command.main(arguments)
