from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from gguf_tools import make_tiny_llama
from loraproxy.adapters.base_model import BaseModel
from loraproxy.errors import InvalidRequest


def test_the_header_tells_what_adapters_must_fit(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "tiny.gguf"))
    assert (base.architecture, base.name, base.n_layer, base.n_vocab) == ("llama", "Tiny", 2, 320)
    assert (base.n_head, base.n_head_kv) == ((4, 4), (2, 2))
    assert base.tensors["blk.1.ffn_down.weight"] == (64, 96)
    assert base.describe() == "llama model 'Tiny'"


def test_a_tied_head_has_the_shape_of_the_embedding(tmp_path):
    tied = BaseModel.from_gguf(make_tiny_llama(tmp_path / "tied.gguf"))
    untied = BaseModel.from_gguf(make_tiny_llama(tmp_path / "untied.gguf", tied=False))
    assert (tied.tied_output, untied.tied_output) == (True, False)
    assert tied.shape_of("output.weight") == untied.shape_of("output.weight") == (320, 64)
    assert tied.shape_of("blk.9.attn_q.weight") is None


def split(folder: Path) -> None:
    """A model of two tensors, one in each of two files, as llama.cpp's gguf-split writes them."""
    for part in range(2):
        writer = GGUFWriter(folder / f"big-{part + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", part)
        if part == 0:
            writer.add_block_count(1)
            writer.add_head_count(2)
        writer.add_tensor(["token_embd.weight", "blk.0.attn_q.weight"][part], np.zeros((8, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_a_split_model_is_read_from_its_first_part(tmp_path):
    split(tmp_path)
    base = BaseModel.from_gguf(tmp_path / "big-00001-of-00002.gguf")
    assert set(base.tensors) == {"token_embd.weight", "blk.0.attn_q.weight"}
    assert base.n_head_kv == base.n_head == (2,)
    with pytest.raises(InvalidRequest, match=r"split into 2; name the first, NAME-00001-of-00002.gguf"):
        BaseModel.from_gguf(tmp_path / "big-00002-of-00002.gguf")
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    with pytest.raises(InvalidRequest, match="No such file"):
        BaseModel.from_gguf(tmp_path / "big-00001-of-00002.gguf")


def reason(path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        BaseModel.from_gguf(path)
    prefix = f"base model {path}: "
    assert caught.value.message.startswith(prefix)
    return caught.value.message.removeprefix(prefix)


def test_what_is_no_whole_model_is_refused_with_the_reason(tmp_path):
    whole = make_tiny_llama(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    assert reason(path) == "No such file or directory"
    assert "is not a regular file" in reason(tmp_path)
    path.write_bytes(b"")
    assert reason(path) == "the file is empty"
    path.write_bytes(b"\x00" * 100)
    assert reason(path) == "not a GGUF file (it does not begin with 'GGUF')"
    path.write_bytes(whole[:5000])
    assert "truncated or damaged" in reason(path)
    path.write_bytes(whole[:-1000])
    assert "truncated or damaged" in reason(path)


def test_head_counts_must_be_given_for_every_layer(tmp_path):
    make_tiny_llama(tmp_path / "bad.gguf", metadata={"head_count": [4, 4, 4]})
    assert reason(tmp_path / "bad.gguf") == "llama.attention.head_count must hold 2 whole numbers, one for each layer"
