"""GGUF's packed types, value by value from the description of their bits, and random blocks of each.

Written without the code under test and without the `gguf` package: one value at a time, in Python integers. A block
of 32 or 256 values has a scale d (and a minimum), half precision; the K types scale runs of 16 or 32 values once more.
"""

import dataclasses
import struct
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packing:
    """One type.

    Attributes:
      values: in a block.
      size: of a block, in bytes.
      scale_at: where d lies in a block.
      minimum_at: where the second number lies, if there is one.
      typical: a d that makes values of about 0.05.
      minimum: what the second number is then, in units of d, so that values lie around zero.
      decode: (block, i) -> (scale, minimum) factors and quant of value i: value = d * scale * quant + second * minimum.
    """

    values: int
    size: int
    scale_at: int
    minimum_at: int | None
    typical: float
    minimum: float
    decode: Callable[[bytes, int], tuple[int, int, int]]


def _nibble(data: bytes, i: int) -> int:
    """Value i of 32 in 16 bytes: the low halves first, then the high ones."""
    return data[i % 16] >> 4 * (i // 16) & 15


def _bit(data: bytes, i: int) -> int:
    return data[i // 8] >> i % 8 & 1


def _six_bits(scales: bytes, i: int) -> tuple[int, int]:
    """Scale and minimum i of 8, 6 bits each, in the 12 bytes of Q4_K and Q5_K."""
    if i < 4:
        return scales[i] & 63, scales[i + 4] & 63
    return scales[i + 4] & 15 | scales[i - 4] >> 6 << 4, scales[i + 4] >> 4 | scales[i] >> 6 << 4


def _q8_0(b: bytes, i: int) -> tuple[int, int, int]:
    return 1, 0, struct.unpack_from("b", b, 2 + i)[0]


def _q4_0(b: bytes, i: int) -> tuple[int, int, int]:
    return 1, 0, _nibble(b[2:], i) - 8


def _q4_1(b: bytes, i: int) -> tuple[int, int, int]:
    return 1, 1, _nibble(b[4:], i)


def _q5_0(b: bytes, i: int) -> tuple[int, int, int]:
    return 1, 0, (_nibble(b[6:], i) | _bit(b[2:6], i) << 4) - 16


def _q5_1(b: bytes, i: int) -> tuple[int, int, int]:
    return 1, 1, _nibble(b[8:], i) | _bit(b[4:8], i) << 4


def _two_bits(quants: bytes, i: int) -> int:
    """Value i of 256 in 64 bytes: 32 bytes hold 128 values, value i beside i + 32, i + 64 and i + 96."""
    return quants[i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3


def _q2_k(b: bytes, i: int) -> tuple[int, int, int]:
    scale = b[i // 16]  # scales[16], quants[64], d, dmin
    return scale & 15, -(scale >> 4), _two_bits(b[16:80], i)


def _q3_k(b: bytes, i: int) -> tuple[int, int, int]:
    mask, quants, scales = b[:32], b[32:96], b[96:108]  # and d
    high = mask[i % 32] >> i // 32 & 1
    j = i // 16
    low = scales[j % 8] >> 4 * (j // 8) & 15
    return (low | (scales[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32, 0, _two_bits(quants, i) - (0 if high else 4)


def _q4_k(b: bytes, i: int) -> tuple[int, int, int]:
    scale, minimum = _six_bits(b[4:16], i // 32)  # d, dmin, scales[12], quants[128]
    return scale, -minimum, b[16 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15


def _q5_k(b: bytes, i: int) -> tuple[int, int, int]:
    scale, minimum = _six_bits(b[4:16], i // 32)  # d, dmin, scales[12], high bits[32], quants[128]
    low = b[48 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15
    return scale, -minimum, low | (b[16 + i % 32] >> i // 32 & 1) << 4


def _q6_k(b: bytes, i: int) -> tuple[int, int, int]:
    half, run, place = i // 128, i % 128 // 32, i % 32  # low[128], high[64], scales[16], d
    low = b[half * 64 + run % 2 * 32 + place] >> 4 * (run // 2) & 15
    high = b[128 + half * 32 + place] >> 2 * run & 3
    return struct.unpack_from("b", b, 192 + i // 16)[0], 0, (low | high << 4) - 32


PACKINGS = {
    "Q8_0": Packing(32, 34, 0, None, 7e-4, 0, _q8_0),
    "Q4_0": Packing(32, 18, 0, None, 1e-2, 0, _q4_0),
    "Q4_1": Packing(32, 20, 0, 2, 1e-2, -7.5, _q4_1),
    "Q5_0": Packing(32, 22, 0, None, 5e-3, 0, _q5_0),
    "Q5_1": Packing(32, 24, 0, 2, 5e-3, -15.5, _q5_1),
    "Q2_K": Packing(256, 84, 80, 82, 4e-3, 1.5, _q2_k),
    "Q3_K": Packing(256, 110, 108, None, 1.2e-3, 0, _q3_k),
    "Q4_K": Packing(256, 144, 0, 2, 2.5e-4, 7.5, _q4_k),
    "Q5_K": Packing(256, 176, 0, 2, 1.2e-4, 15.5, _q5_k),
    "Q6_K": Packing(256, 210, 208, None, 4e-5, 0, _q6_k),
}


def decode(kind: str, packed: np.ndarray) -> np.ndarray:
    """u8[..., bytes] -> f32[..., values]. The products are exact in float64, so each value is rounded once."""
    packing = PACKINGS[kind]
    values = []
    for start in range(0, packed.size, packing.size):
        block = packed.reshape(-1)[start : start + packing.size].tobytes()
        d = struct.unpack_from("<e", block, packing.scale_at)[0]
        second = 0.0 if packing.minimum_at is None else struct.unpack_from("<e", block, packing.minimum_at)[0]
        for i in range(packing.values):
            scale, minimum, quant = packing.decode(block, i)
            values.append(d * (scale * quant) + second * minimum if minimum else d * (scale * quant))
    shape = (*packed.shape[:-1], packed.shape[-1] // packing.size * packing.values)
    return np.asarray(values).astype(np.float32).reshape(shape)


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """u8[rows, bytes] for [rows, columns] values of about 0.05, around zero."""
    packing = PACKINGS[kind]
    blocks = random.integers(0, 256, (rows * columns // packing.values, packing.size), np.uint8)
    d = (packing.typical * random.uniform(0.7, 1.3, len(blocks))).astype("<f2")
    blocks[:, packing.scale_at : packing.scale_at + 2] = d.view(np.uint8).reshape(-1, 2)
    if packing.minimum_at is not None:
        second = (packing.minimum * d).astype("<f2")
        blocks[:, packing.minimum_at : packing.minimum_at + 2] = second.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
