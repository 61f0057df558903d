"""A stand-in for an Ollama server: ``python -m tests.ollama_server --port PORT --model NAME=GGUF``.

It is not Ollama. Ollama's program cannot be had where these tests run, so what this project does with an Ollama server
is tested against this one, which was written from Ollama's published API documentation (docs/api.md) and, where that
is silent, from what its server is seen to do (server/routes.go and server/create.go, 0.12 to 0.34). It is strict: it
answers what Ollama answers, refuses what Ollama refuses with the same status and words, and keeps models as Ollama
keeps them, as manifests and blobs in a folder that survive a restart. What it generates is real: each model that is
asked for is run by a llama-server of its own, base and adapter, which is also how Ollama itself runs models.

Known differences: no registry (pull and push are not there), no Go templates (the model's own chat template is used,
and a request that brings its own is refused with 501), no images, no tools, no thinking, no safetensors, none of the
endpoints under ``/v1``.
"""
