"""Shapes that drive this op's tests and benchmarks: written once."""

import dataclasses
from typing import Any

import numpy as np

from octavo.pallas_kernels.ragged_paged_attention.api import Tiling

_SMALL_TILING = Tiling(chunk=32, decode_group=2, tile=8, prefill_group=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One ragged batch: (query length, KV length) per row, decode rows first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int  # T
    num_rows: int  # R
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    tiling: Tiling = _SMALL_TILING
    kv_dtype: str = "bfloat16"  # of the cache, on the device


_DECODE = tuple((1, n) for n in (1, 15, 16, 17, 64, 65, 33))
_MIXED = ((1, 5), (1, 33), (1, 100), (20, 20), (7, 77), (1, 1))

SMALL_CASES = (
    Case("decode", _DECODE, num_tokens=8, num_rows=8),
    Case("decode_one_row", ((1, 70),), num_tokens=1, num_rows=1),
    Case("decode_one_group", _DECODE, num_tokens=8, num_rows=8, tiling=Tiling(32, decode_group=16, tile=8)),
    Case("decode_one_group_window", _DECODE, num_tokens=8, num_rows=8, window=10, tiling=Tiling(32, decode_group=8)),
    Case("decode_block_32", _DECODE, num_tokens=8, num_rows=8, block_size=32),
    Case("decode_mha", _DECODE, num_tokens=8, num_rows=8, num_heads=4, num_kv_heads=4),
    Case("decode_mqa", _DECODE, num_tokens=8, num_rows=8, num_heads=4, num_kv_heads=1),
    Case("decode_window", _DECODE, num_tokens=8, num_rows=8, window=10),
    Case("decode_sinks_soft_cap", _DECODE, num_tokens=8, num_rows=8, soft_cap=5.0, sinks=True),
    Case("prefill", ((40, 40),), num_tokens=40, num_rows=4),
    Case("prefill_padded", ((33, 33), (2, 2)), num_tokens=64, num_rows=4),
    Case("chunk", ((24, 100), (16, 64)), num_tokens=40, num_rows=4),
    Case("chunk_window", ((24, 100), (16, 64)), num_tokens=40, num_rows=4, window=10),
    Case("mixed", _MIXED[:5], num_tokens=64, num_rows=8),
    Case("mixed_window", _MIXED[:5], num_tokens=64, num_rows=8, window=10),
    Case("mixed_sinks_soft_cap", _MIXED[:5], num_tokens=64, num_rows=8, soft_cap=5.0, sinks=True),
    Case("bidirectional", ((20, 20), (7, 7)), num_tokens=32, num_rows=4, causal=False),
)


def _bench(
    name: str,
    *rows: tuple[int, int],
    num_tokens: int | None = None,
    num_rows: int | None = None,
    kv_dtype: str = "bfloat16",
) -> Case:
    total = sum(q_len for q_len, _ in rows)
    return Case(
        name, rows, num_tokens or total, num_rows or len(rows), num_heads=32, num_kv_heads=8, head_size=128,
        kv_dtype=kv_dtype,
    )  # fmt: skip


# Llama-3.1-8B's heads; the ids of benchmarks/results/*/kernels.json.
BENCH_CASES = (
    _bench("decode_256x1024", *((1, 1024),) * 256),
    _bench("decode_128x4096", *((1, 4096),) * 128),
    _bench("decode_256x256", *((1, 256),) * 256),
    _bench("decode_32x1024", *((1, 1024),) * 32),
    _bench("decode_16x8192", *((1, 8192),) * 16),
    _bench("decode_1x8192", (1, 8192)),
    _bench("decode_1x1024", (1, 1024)),
    _bench("decode_skewed", *((1, 512),) * 255, (1, 32768)),
    _bench("prefill_1x8192", (8192, 8192)),
    _bench("prefill_1x32768", (32768, 32768)),
    _bench("prefill_8x1024", *((1024, 1024),) * 8),
    _bench("chunk_512_on_16k", (512, 16896)),
    _bench("mixed_2048_255", *((1, 1024),) * 255, (2048, 2048), num_tokens=2304),
    _bench("decode_fp8_256x1024", *((1, 1024),) * 256, kv_dtype="float8_e4m3fn"),
)

_RNG = np.random.default_rng(0)
_RAGGED_DECODE = tuple((1, int(n)) for n in _RNG.integers(1, 5000, 60))
_RAGGED_PREFILL = tuple((int(q), int(q + n)) for q, n in _RNG.integers(2, 700, (6, 2)))

# Random lengths and padding, one batch a kind: what the error is measured on besides the cases above.
RAGGED_CASES = (
    _bench("ragged_decode", *_RAGGED_DECODE, num_tokens=64, num_rows=64),
    _bench("ragged_prefill", *_RAGGED_PREFILL, num_tokens=4608, num_rows=64),
    _bench("ragged_mixed", *_RAGGED_DECODE[:50], *_RAGGED_PREFILL, num_tokens=4608, num_rows=64),
    _bench("ragged_decode_fp8", *_RAGGED_DECODE, num_tokens=64, num_rows=64, kv_dtype="float8_e4m3fn"),
    _bench("ragged_mixed_fp8", *_RAGGED_DECODE[:50], *_RAGGED_PREFILL, num_tokens=4608, num_rows=64,
           kv_dtype="float8_e4m3fn"),
)  # fmt: skip


def make_inputs(case: Case, seed: int = 0, num_blocks: int = 96) -> dict[str, Any]:
    """Random inputs in numpy; NaN wherever nothing valid is: padding, foreign blocks, the tails of blocks.

    Returns:
      q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, sinks, and `dense`: per
      row the whole (keys, values) as [L, K, H] for a reference without pages.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    k_heads, size, block = case.num_kv_heads, case.head_size, case.block_size
    width = -(-max(length for _, length in case.rows) // block) + 1
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    cache = np.full((num_blocks, 2, k_heads, block, size), np.nan, np.float32)
    tables = np.zeros((case.num_rows, width), np.int32)
    q = np.full((case.num_tokens, case.num_heads, size), np.nan, np.float32)
    new = np.full((2, case.num_tokens, k_heads, size), np.nan, np.float32)
    cu_q_lens, kv_lens = np.zeros(case.num_rows + 1, np.int32), np.zeros(case.num_rows, np.int32)
    dense = []
    for r, (q_len, length) in enumerate(case.rows):
        whole, at = normal(2, length, k_heads, size), cu_q_lens[r]
        dense.append(whole)
        for i in range(-(-length // block)):
            tables[r, i] = next(free)
        for position in range(length - q_len):
            cache[tables[r, position // block], :, :, position % block] = whole[:, position]
        q[at : at + q_len] = normal(q_len, case.num_heads, size)
        new[:, at : at + q_len] = whole[:, length - q_len :]
        kv_lens[r], cu_q_lens[r + 1] = length, at + q_len
    cu_q_lens[len(case.rows) :] = cu_q_lens[len(case.rows)]
    return {
        "q": q, "k": new[0], "v": new[1], "cache": cache, "kv_lens": kv_lens, "block_tables": tables,
        "cu_q_lens": cu_q_lens, "num_decode": np.int32(sum(q_len == 1 for q_len, _ in case.rows)),
        "sinks": normal(case.num_heads) if case.sinks else None, "dense": dense,
    }  # fmt: skip
