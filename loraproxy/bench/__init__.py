"""``loraproxy bench``: the product measured beside a real llama-server, and beside its own engine without HTTP."""

from loraproxy.bench.command import main

__all__ = ["main"]
