"""loraproxy: a sidecar for llama.cpp that gives every request its own LoRA adapter."""

__version__ = "0.1.0"
