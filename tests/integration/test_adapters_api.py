"""Adapters registered and uploaded through the API of the real product, and what is there after a restart."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from proxies import SMALL, call, running_proxy
from servers import Server, demo_adapters

QUESTION = {"messages": [{"role": "user", "content": "Where can I sleep tonight?"}], "temperature": 0, "max_tokens": 48}
BEGINNINGS = {"pirate": "Arr", "robot": "BEEP", "wizard": "By the ancient stars", "bard": "Hark"}


def speaks_like(server: Server, lora: str) -> str:
    """Which character the answers under ``lora`` are."""
    status, _, body = call(server, "POST", "/v1/chat/completions", {**QUESTION, "lora": lora})
    assert status == 200, body
    text: str = body["choices"][0]["message"]["content"]
    return next((name for name, beginning in BEGINNINGS.items() if text.startswith(beginning)), text)


def upload_folder(server: Server, name: str, folder: Path) -> tuple[int, Any]:
    """PUT a PEFT folder as a form."""

    async def put() -> tuple[int, Any]:
        form = aiohttp.FormData({"description": "from a form"})
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            form.add_field(file, BytesIO((folder / file).read_bytes()), filename=file)
        async with (
            aiohttp.ClientSession(server.base_url) as session,
            session.put(f"/adapters/{name}", data=form) as response,
        ):
            return response.status, await response.json()

    return asyncio.run(put())


def test_adapters_come_by_path_and_by_upload_and_uploads_survive_a_restart(tmp_path: Path, model: Path) -> None:
    demo, uploads = demo_adapters(), tmp_path / "uploads"
    base = BaseModel.from_gguf(model)
    gguf = tmp_path / "robot.gguf"
    write_gguf_adapter(read_adapter("robot", demo["robot"], base), base, gguf, "f16")
    binary = {"Content-Type": "application/octet-stream"}
    arguments = ["serve", "-m", str(model), *SMALL, "--upload-dir", str(uploads)]

    with running_proxy(tmp_path, [*arguments, "--adapter-root", str(demo["pirate"].parent)]) as server:
        status, _, made = call(server, "PUT", "/adapters/npc", {"path": str(demo["pirate"])})
        assert (status, made["state"], made["targets"]) == (201, "registered", 120), made
        assert speaks_like(server, "npc") == "pirate"
        status, _, made = call(server, "PUT", "/adapters/npc", {"path": "bard"})
        assert status == 200
        assert speaks_like(server, "npc") == "bard"

        status, _, made = call(server, "PUT", "/adapters/up-gguf", gguf.read_bytes(), binary)
        assert (status, made["format"]) == (201, "gguf"), made
        assert speaks_like(server, "up-gguf") == "robot"
        status, made = upload_folder(server, "up-peft", demo["wizard"])
        assert (status, made["format"], made["description"]) == (201, "peft", "from a form"), made
        assert "rsLoRA" in made["notes"][0]
        assert speaks_like(server, "up-peft") == "wizard"
        status, made = upload_folder(server, "up-gone", demo["pirate"])
        assert status == 201
        status, _, refused = call(server, "PUT", "/adapters/up-bad", gguf.read_bytes()[:-1000], binary)
        assert status == 400
        assert "up-bad" in refused["error"]["message"]
        assert str(uploads) not in refused["error"]["message"]

        loaded = call(server, "POST", "/v1/load_lora_adapter", {"lora_name": "v", "lora_path": str(demo["robot"])})
        assert (loaded[0], loaded[2]) == (200, "Success: LoRA adapter 'v' added successfully.")
        assert "v" in [entry["id"] for entry in call(server, "GET", "/v1/models")[2]["data"]]
        assert speaks_like(server, "v") == "robot"
        assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "v"})[0] == 200
        status, _, body = call(server, "POST", "/v1/chat/completions", {**QUESTION, "lora": "v"})
        assert status == 400
        assert "unknown adapter 'v'; known adapters: npc, up-gguf, up-gone, up-peft" in body["error"]["message"]

    (kept,) = (uploads / "up-gone").iterdir()
    (kept / "adapter_model.safetensors").write_bytes(b"damaged")
    with running_proxy(tmp_path, arguments) as server:
        assert [a["name"] for a in call(server, "GET", "/adapters")[2]["data"]] == ["up-gguf", "up-gone", "up-peft"]
        assert speaks_like(server, "up-gguf") == "robot"
        assert speaks_like(server, "up-peft") == "wizard"
        assert call(server, "GET", "/adapters/up-peft")[2]["description"] == "from a form"
        status, _, body = call(server, "POST", "/v1/chat/completions", {**QUESTION, "lora": "up-gone"})
        assert status == 400
        assert "adapter_model.safetensors" in body["error"]["message"]
        assert call(server, "GET", "/adapters/up-gone")[2]["state"] == "failed"
        assert call(server, "DELETE", "/adapters/up-gone")[0] == 200
        assert call(server, "PUT", "/adapters/npc", {"path": str(demo["pirate"])})[0] == 400
    assert sorted(path.name for path in uploads.iterdir()) == ["up-gguf", "up-peft"]
