"""Adapters: names, digests, GGUF and PEFT files, and the adapter set a request runs under."""
