"""The codes of ggml's block types, so that a weight can be moved by whole steps of its own block's grid.

Where each value's bits lie: the dequantize_row functions of ggml/src/ggml-quants.c. Scales and minima stay as they
are; what a code is worth is asked of ggml itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from loraproxy.tools.ggml import decode_rows

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class _Bits:
    """Bits of every value of a block: ``mask`` from bit ``shift`` of byte ``byte`` on, at bit ``up`` of the code."""

    byte: NDArray[np.intp]
    shift: NDArray[np.intp]
    mask: int
    up: int


@dataclass(frozen=True)
class Grid:
    """How the codes of one type lie in its blocks; a code's value grows or falls linearly within a block."""

    type: GGMLQuantizationType
    fields: tuple[_Bits, ...]

    @property
    def highest(self) -> int:
        """Codes are 0 to this."""
        return sum(bits.mask << bits.up for bits in self.fields)

    def codes(self, raw: NDArray[np.uint8], n_columns: int) -> Codes:
        """The codes of whole rows, (rows, n_columns)."""
        blocks = self._blocks(raw).astype(np.int32)
        found: Codes = np.zeros((len(blocks), GGML_QUANT_SIZES[self.type][0]), np.int32)
        for bits in self.fields:
            found |= (blocks[:, bits.byte] >> bits.shift & bits.mask) << bits.up
        return found.reshape(-1, n_columns)

    def with_codes(self, raw: NDArray[np.uint8], codes: Codes) -> NDArray[np.uint8]:
        """``raw`` with other codes, as new bytes."""
        blocks = self._blocks(raw).copy()
        block = GGML_QUANT_SIZES[self.type][0]
        given = codes.reshape(-1, block)
        for bits in self.fields:
            for shift in np.unique(bits.shift):
                # values that share a byte differ in their shift
                at = np.flatnonzero(bits.shift == shift)
                kept = blocks[:, bits.byte[at]] & (0xFF ^ (bits.mask << shift))
                blocks[:, bits.byte[at]] = kept | ((given[:, at] >> bits.up & bits.mask) << shift).astype(np.uint8)
        flat: NDArray[np.uint8] = blocks.reshape(-1)
        return flat

    def steps(self, raw: NDArray[np.uint8], n_columns: int) -> NDArray[np.float32]:
        """What one more of each code adds to its value, (rows, n_columns)."""
        blocks = self._blocks(raw)
        all_bits, first_bit = np.zeros(blocks.shape[1], np.uint8), np.zeros(blocks.shape[1], np.uint8)
        for bits in self.fields:
            np.bitwise_or.at(all_bits, bits.byte, (bits.mask << bits.shift).astype(np.uint8))
            if bits.up == 0:
                np.bitwise_or.at(first_bit, bits.byte, (1 << bits.shift).astype(np.uint8))
        zeros = blocks & ~all_bits
        low, high = (decode_rows(codes, self.type, n_columns) for codes in (zeros, zeros | first_bit))
        return high - low

    def _blocks(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        blocks: NDArray[np.uint8] = raw.reshape(-1, GGML_QUANT_SIZES[self.type][1])
        return blocks


def _nibbles(start: int, group: int) -> _Bits:
    """Four bits a value: in each run of 2 * group values the low halves of the bytes first, then the high ones."""
    i = np.arange(32 if group == 16 else 256)
    return _Bits(start + i // (2 * group) * group + i % group, i % (2 * group) // group * 4, 15, 0)


def _bit(start: int, n_bytes: int, up: int) -> _Bits:
    """One bit a value: of 256 values each byte's bits are 32 values apart; of 32 they lie side by side."""
    i = np.arange(n_bytes * 8)
    if n_bytes == 4:
        return _Bits(start + i // 8, i % 8, 1, up)
    return _Bits(start + i % 32, i // 32, 1, up)


def _pairs_of_bits(start: int, up: int) -> _Bits:
    """Two bits a value: in each 128 values a byte's pairs of bits are 32 values apart."""
    i = np.arange(256)
    return _Bits(start + i // 128 * 32 + i % 32, i % 128 // 32 * 2, 3, up)


_T = GGMLQuantizationType
GRIDS = {
    kind: Grid(kind, fields)
    for kind, fields in {
        _T.Q4_0: (_nibbles(2, 16),),
        _T.Q4_1: (_nibbles(4, 16),),
        _T.Q5_0: (_nibbles(6, 16), _bit(2, 4, 4)),
        _T.Q5_1: (_nibbles(8, 16), _bit(4, 4, 4)),
        _T.Q2_K: (_pairs_of_bits(16, 0),),
        _T.Q3_K: (_pairs_of_bits(32, 0), _bit(0, 32, 2)),
        _T.Q4_K: (_nibbles(16, 32),),
        _T.Q5_K: (_nibbles(48, 32), _bit(16, 32, 4)),
        _T.Q6_K: (_nibbles(0, 64), _pairs_of_bits(128, 4)),
    }.items()
}
"""The types whose blocks are linear and coarse enough for this to matter."""
