"""One adapter from several: the arithmetic, the names, the refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import make_tiny_llama
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.compose import compose, set_digest
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.errors import InvalidAdapterFile

V, Q, EMBD = "blk.0.attn_v.weight", "blk.1.attn_q.weight", "token_embd.weight"
SHAPES = {V: (32, 64), Q: (64, 64), EMBD: (64, 320)}  # (n_out, n_in) as a pair sees them


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf", tied=False))


def pair(target, rank, scale, seed):
    random = np.random.default_rng(seed)
    n_out, n_in = SHAPES[target]
    a, b = random.normal(0, 1, (rank, n_in)), random.normal(0, 1, (n_out, rank))
    op = Op.GET_ROWS if target == EMBD else Op.MUL_MAT
    return LoraTensor(target, op, a.astype(np.float32), b.astype(np.float32), scale)


def adapter(name, *tensors, notes=()):
    digest = name.encode().hex().ljust(64, "0")
    return Adapter(name, Path(f"{name}.gguf"), digest, "gguf", tensors, notes)


def delta(tensors, target, scale=1.0):
    """The matrix that the pairs for ``target`` add to its weight."""
    parts = [t.scale * scale * t.b.astype(np.float64) @ t.a.astype(np.float64) for t in tensors if t.target == target]
    return sum(parts, np.zeros(SHAPES[target]))


PIRATE = adapter("pirate", pair(V, 4, 2.0, 1), pair(EMBD, 3, 0.5, 2))
BARD = adapter("bard", pair(V, 6, 0.25, 3), pair(Q, 2, 1.0, 4), notes=("rsLoRA",))


def test_the_composed_adapter_adds_what_the_set_adds(base):
    whole = compose([(PIRATE, 0.5), (BARD, 0.7)], base)
    assert [(t.target, t.op, t.rank, t.scale) for t in whole.tensors] == [
        (EMBD, Op.GET_ROWS, 3, 1.0),
        (V, Op.MUL_MAT, 10, 1.0),
        (Q, Op.MUL_MAT, 2, 1.0),
    ]
    for target in SHAPES:
        expected = delta(PIRATE.tensors, target, 0.5) + delta(BARD.tensors, target, 0.7)
        np.testing.assert_allclose(delta(whole.tensors, target), expected, rtol=1e-5, atol=1e-5)


def test_it_is_named_by_its_members_and_keeps_their_notes(base):
    whole = compose([(PIRATE, 0.5), (BARD, 0.7)], base)
    assert (whole.name, whole.source, whole.notes) == ("bard=0.7+pirate=0.5", "composed", ("bard: rsLoRA",))
    assert whole.digest == set_digest([(PIRATE.digest, 0.5), (BARD.digest, 0.7)])


def test_the_order_of_the_members_makes_no_difference(base):
    one, other = compose([(PIRATE, 0.5), (BARD, 0.7)], base), compose([(BARD, 0.7), (PIRATE, 0.5)], base)
    assert (one.name, one.digest) == (other.name, other.digest)
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        np.testing.assert_array_equal(mine.a, theirs.a)
        np.testing.assert_array_equal(mine.b, theirs.b)


def test_a_single_adapter_is_composed_too_and_negative_scales_are_scales(base):
    whole = compose([(BARD, -1.5)], base)
    np.testing.assert_allclose(delta(whole.tensors, Q), delta(BARD.tensors, Q, -1.5), rtol=1e-5, atol=1e-5)


def test_members_of_scale_zero_are_left_out(base):
    whole = compose([(PIRATE, 0.0), (BARD, 1.0)], base)
    assert whole.digest == set_digest([(BARD.digest, 1.0)])
    assert {t.target for t in whole.tensors} == {V, Q}


def test_the_same_adapter_under_two_names_counts_twice(base):
    whole = compose([(BARD, 0.5), (replace(BARD, name="minstrel"), 0.25)], base)
    np.testing.assert_allclose(delta(whole.tensors, Q), delta(BARD.tensors, Q, 0.75), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("members", [[], [(PIRATE, 0.0)]])
def test_the_base_model_cannot_be_composed(base, members):
    with pytest.raises(ValueError, match="base model"):
        compose(members, base)


def test_too_many_ranks_together_are_refused_with_the_names(base):
    one, two = adapter("one", pair(V, 600, 1.0, 1)), adapter("two", pair(V, 600, 1.0, 2))
    with pytest.raises(InvalidAdapterFile) as caught:
        compose([(one, 1.0), (two, 0.5)], base)
    assert caught.value.message == f"adapters one=1+two=0.5: tensor {V} has rank 1200; 1 to 1024 are supported"


def test_a_scale_that_overflows_is_refused(base):
    with pytest.raises(InvalidAdapterFile, match="NaN or infinite"):
        compose([(PIRATE, 3e38)], base)


def test_an_activated_lora_is_refused_by_name(base):
    alora = replace(adapter("late", pair(V, 2, 1.0, 5)), invocation_tokens=(7, 8))
    with pytest.raises(InvalidAdapterFile, match=r"late is an activated LoRA \(aLoRA\)"):
        compose([(PIRATE, 0.5), (alora, 1.0)], base)


def test_the_written_file_reads_back_as_the_same_adapter(base, tmp_path):
    whole = compose([(PIRATE, 0.5), (BARD, 0.7)], base)
    path = tmp_path / "composed.gguf"
    write_gguf_adapter(whole, base, path, "f32")
    read = read_adapter("composed", path, base)
    for target in SHAPES:
        np.testing.assert_allclose(delta(read.tensors, target), delta(whole.tensors, target), rtol=1e-6, atol=1e-6)


def test_a_sets_digest_depends_on_adapters_and_scales_alone():
    a, b = "aa" * 32, "bb" * 32
    one = set_digest([(a, 0.5), (b, 0.7)])
    assert one == set_digest([(b, 0.7), (a, 0.5), ("cc" * 32, 0.0)])
    assert one == set_digest([(a, 0.5), (b, float(np.float32(0.7)))])
    assert len({one, set_digest([(a, 0.7), (b, 0.5)]), set_digest([(a, 0.5)]), set_digest([])}) == 4
