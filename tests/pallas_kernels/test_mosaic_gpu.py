"""The Hopper attention: interpreted on the CPU against the reference, and compiled for an H200 without one."""

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import (
    dispatch,
    mosaic_decode,
    mosaic_decode_fp8,
    mosaic_gpu,
    mosaic_prefill,
    reference,
)
from octavo.pallas_kernels.ragged_paged_attention.cases import Case, make_inputs
from octavo.pallas_kernels.ragged_paged_attention.parameters import Parameters
from octavo.pallas_kernels.ragged_paged_attention.worklist import plan_decode

HERE = pathlib.Path(__file__).parent
BLOCKS = 2  # of the interpreted grid
DECODE = tuple((1, n) for n in (1, 300, 64, 65, 17))
MIXED = ((1, 5), (1, 140), (130, 130), (7, 151))
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
ALL_OPTIONS = {"window": 30, "soft_cap": 5.0, "sinks": True}
FP8 = "float8_e4m3fn"
ONE = {"num_heads": 2, "num_kv_heads": 1}
CASES = (
    Case("decode", DECODE, 8, 8, **HEADS),
    Case("decode_group_of_3", DECODE[:2], 3, 3, num_heads=6, num_kv_heads=2, head_size=128, block_size=32),
    Case("decode_group_of_7_sinks", DECODE[:2], 3, 3, num_heads=14, num_kv_heads=2, head_size=64, sinks=True),
    Case("decode_group_of_16", DECODE[:2], 2, 2, num_heads=16, num_kv_heads=1, head_size=64, kv_dtype=FP8),
    Case("decode_window_sinks", DECODE[:3], 4, 4, **HEADS, **ALL_OPTIONS),
    Case("decode_96", DECODE[:3], 3, 3, **(HEADS | {"head_size": 96}), block_size=64),
    Case("decode_256", DECODE[:3], 4, 4, **(HEADS | {"head_size": 256}), block_size=128),
    Case("decode_fp8", DECODE, 8, 8, **HEADS, kv_dtype=FP8),
    Case("decode_fp8_128", DECODE[:3], 4, 4, **(HEADS | {"head_size": 128}), kv_dtype=FP8, **ALL_OPTIONS),
    Case("mixed", MIXED, 152, 6, **ONE, head_size=64),
    Case("mixed_window_sinks", MIXED[1:], 144, 6, num_heads=4, num_kv_heads=4, head_size=64, **ALL_OPTIONS),
    Case("mixed_96_fp8", MIXED[1:], 144, 6, **ONE, head_size=96, block_size=32, kv_dtype=FP8, **ALL_OPTIONS),
    Case("mixed_128_fp8", MIXED[1:], 144, 6, **ONE, head_size=128, block_size=128, kv_dtype=FP8),
    Case("mixed_256", MIXED[1:], 144, 6, **ONE, head_size=256),
    Case("mixed_256_fp8", MIXED[1:], 144, 6, **ONE, head_size=256, block_size=64, kv_dtype=FP8, **ALL_OPTIONS),
    Case("bidirectional", ((140, 140), (7, 7)), 152, 4, **ONE, head_size=64, causal=False),
)


def attend(
    case: Case, inputs: dict, interpreted: bool, dtype: str = "bfloat16"
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    given = mosaic_gpu.tiling_for(
        BLOCKS, Parameters(longest=128), num_kv_heads=case.num_kv_heads, head_size=case.head_size,
        narrow=case.kv_dtype == FP8,
    )  # fmt: skip
    workers = given.workers
    tiling = dataclasses.replace(case.tiling, chunk=128, workers=workers if interpreted else None)
    scales = {}
    if case.kv_dtype == FP8:  # one per head, and one number
        scales = {"k_scale": jnp.linspace(0.5, 1.5, case.num_kv_heads), "v_scale": jnp.float32(1.25)}

    @jax.jit
    def f(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, sinks):
        plan = op.prepare(
            kv_lens, block_tables, cu_q_lens, num_decode,
            num_tokens=case.num_tokens, block_size=case.block_size, tiling=tiling, causal=case.causal,
        )  # fmt: skip
        options = {"interpret": True} if interpreted else {}
        chosen = mosaic_gpu if interpreted else reference
        return chosen.attend(
            q, k, v, cache, plan, scale=0.125, causal=case.causal, window=case.window,
            soft_cap=case.soft_cap, sinks=sinks, **options, **scales,
        )  # fmt: skip

    given = dtype if interpreted else "float32"
    arrays = {name: jnp.asarray(inputs[name], dtype).astype(given) for name in ("q", "k", "v", "cache")}
    if case.kv_dtype == FP8:
        arrays["cache"] = jnp.asarray(inputs["cache"]).astype(FP8).view(jnp.uint8)
    out, cache = f(**{name: value for name, value in inputs.items() if name != "dense"} | arrays)
    return np.asarray(out, np.float32), np.asarray(cache, np.float32)


SLOW = ("mixed_128_fp8", "mixed_256", "mixed_256_fp8", "bidirectional")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c.name in SLOW)) for c in CASES], ids=[c.name for c in CASES]
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN in foreign rows is meant
def test_interpreted_matches_reference(case):
    inputs = make_inputs(case)
    out, cache = attend(case, inputs, interpreted=True)
    expected, expected_cache = attend(case, inputs, interpreted=False)
    real = inputs["cu_q_lens"][-1]
    error = np.linalg.norm(out[:real] - expected[:real]) / np.linalg.norm(expected[:real])
    assert error < 5e-3
    assert not out[real:].any(), "padded tokens give zeros"
    np.testing.assert_array_equal(cache[1:], expected_cache[1:])  # block 0 takes the padding, in any order


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_float16():
    case = dataclasses.replace(CASES[0], rows=DECODE[:2], num_tokens=2, num_rows=2)
    inputs = make_inputs(case)
    out, _ = attend(case, inputs, interpreted=True, dtype="float16")
    expected, _ = attend(case, inputs, interpreted=False, dtype="float16")
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8])
def test_rows_do_not_depend_on_neighbours(kv_dtype):
    """Bitwise, within one program: another order of decode rows, and prefill tokens at other places of the batch."""
    rows = ((1, 5), (1, 200), (1, 66), (9, 70), (21, 21))
    case = Case("rows", rows, 40, 6, num_heads=4, num_kv_heads=2, head_size=64, kv_dtype=kv_dtype)
    inputs = make_inputs(case)
    whole, _ = attend(case, inputs, interpreted=True)
    order = [1, 4]  # a decode row, and a prefill row that now begins at token 1 and not at 12
    token = np.array([1, *range(12, 33)])
    some = dict(inputs, num_decode=np.int32(1))
    for name in ("q", "k", "v"):
        some[name] = np.full_like(inputs[name], np.nan)
        some[name][:22] = inputs[name][token]
    for name in ("kv_lens", "block_tables"):
        some[name] = np.zeros_like(inputs[name])
        some[name][:2] = inputs[name][order]
    some["cu_q_lens"] = np.array([0, 1] + [22] * 5, np.int32)
    out, _ = attend(case, some, interpreted=True)
    np.testing.assert_array_equal(out[:22], whole[token])


def test_pieces_depend_on_the_row_alone():
    workers = op.Workers(264, kv_heads=8)
    alone = plan_decode(jnp.array([5000, 0, 0, 0], jnp.int32), 9216, workers)
    company = plan_decode(jnp.array([70, 9000, 5000, 1], jnp.int32), 9216, workers)
    cuts = [np.asarray(plan.pieces) for plan in (alone, company)]
    first, second = (rows[rows[:, 4] == 5000][:, 1:3] for rows in cuts)
    np.testing.assert_array_equal(first[first[:, 1] > first[:, 0]], second[second[:, 1] > second[:, 0]])


@pytest.mark.parametrize("lengths", [[1] * 8, [0] * 8, [100, 9000, 1, 64, 0, 0, 0, 0], [4096] * 8])
def test_every_token_is_some_workers(lengths):
    """Each head of each piece is in one list; the pieces of a row tile it; no list has much more than its share."""
    workers = op.Workers(40, kv_heads=4)
    plan = plan_decode(jnp.array(lengths, jnp.int32), 9216, workers)
    first, pieces = np.asarray(plan.first), np.asarray(plan.pieces)
    count = int((pieces[:, 2] > pieces[:, 1]).sum())
    assert first[0] == 0 and first[-1] == count * workers.kv_heads
    assert (np.diff(first) >= 0).all()
    for row, length in enumerate(lengths):
        mine = pieces[:count][pieces[:count, 0] == row]
        assert mine[:, 2].max(initial=0) == length
        np.testing.assert_array_equal(mine[1:, 1], mine[:-1, 2])
        slots = mine[:, 3]
        assert (slots == -1).all() if len(mine) <= 1 else len(set(slots)) == len(mine)
    cost = np.repeat(-(-(pieces[:count, 2] - pieces[:count, 1]) // 64) + 1, workers.kv_heads)
    loads = [cost[a:b].sum() for a, b in itertools.pairwise(first)]
    assert max(loads, default=0) <= cost.sum() / workers.lists + cost.max(initial=0)


def test_registers_fit():
    """A warpgroup that asks for more than the block has left waits for ever, and only on the device."""
    per_thread = {3: 168, 4: 128}  # with which so many warpgroups start: a multiprocessor's, in whole eights
    blocks = [
        (2, c, 1, p) for c, p in zip(mosaic_prefill.CONSUMER_REGISTERS, mosaic_prefill.PRODUCER_REGISTERS, strict=True)
    ]
    for count, consumer in mosaic_decode.CONSUMER_REGISTERS.items():
        blocks.append((2, consumer, count, mosaic_decode.PRODUCER_REGISTERS[count]))
    blocks.append((2, mosaic_decode_fp8.CONSUMER_REGISTERS, 2, mosaic_decode_fp8.PRODUCER_REGISTERS))
    for consumers, consumer, producers, producer in blocks:
        warpgroups = consumers + producers
        assert consumers * consumer + producers * producer <= warpgroups * per_thread[warpgroups]


def test_choose_and_refuse():
    heads = dispatch.Heads(32, 8, 128, 16, "bfloat16", "bfloat16")
    assert dispatch.choose("auto", "cpu", heads, jax.devices()[0]).name == "reference"
    with pytest.raises(ConfigError, match="compute capability"):
        dispatch.choose("mosaic_gpu", "cpu", heads, jax.devices()[0])

    hopper = unittest.mock.Mock(
        spec=jax.Device, platform="gpu", compute_capability="9.0", core_count=132, device_kind="a Hopper"
    )
    chosen = dispatch.choose("auto", "gpu", heads, hopper)
    assert chosen.name == "mosaic_gpu"
    assert chosen.tiling.workers == op.Workers(264, 8)
    for change in ({"head_size": 96}, {"head_size": 256}, {"block_size": 128}, {"kv_dtype": FP8}):
        assert dispatch.choose("auto", "gpu", dataclasses.replace(heads, **change), hopper).name == "mosaic_gpu"
    for change, named in (
        ({"head_size": 80}, "head size must be one of .* got 80"),
        ({"block_size": 8}, "block size must be one of .* got 8"),
        ({"dtype": "float32"}, "dtype must be one of .* got float32"),
        ({"kv_dtype": "float16"}, "cache's dtype must be bfloat16 or float8_e4m3fn, got float16"),
        ({"num_heads": 17, "num_kv_heads": 1}, "1 to 16 query heads per KV head, got 17 / 1"),
        ({"num_heads": 9}, "1 to 16 query heads per KV head, got 9 / 8"),
    ):
        other = dataclasses.replace(heads, **change)
        assert dispatch.choose("auto", "gpu", other, hopper).name == "reference"
        with pytest.raises(ConfigError, match=named):
            dispatch.choose("mosaic_gpu", "gpu", other, hopper)


def test_refuses_by_name():
    """What only shows when it is called."""
    case = Case("two", DECODE[:2], 2, 2, **HEADS)
    inputs = {name: jnp.asarray(value) for name, value in make_inputs(case).items() if name not in ("dense", "sinks")}
    plan = op.prepare(
        inputs["kv_lens"], inputs["block_tables"], inputs["cu_q_lens"], inputs["num_decode"],
        num_tokens=2, block_size=16, tiling=op.Tiling(chunk=128),
    )  # fmt: skip
    q, k, v, cache = (inputs[name].astype(jnp.bfloat16) for name in ("q", "k", "v", "cache"))
    with pytest.raises(NotImplementedError, match="no work list"):
        mosaic_gpu.attend(q, k, v, cache, plan, scale=1.0)
    with pytest.raises(NotImplementedError, match="work list"):
        mosaic_gpu.attend(q, k, v, cache.astype(FP8), plan, scale=1.0, k_scale=0.5)
    plan = dataclasses.replace(plan, tiling=op.Tiling(chunk=128, workers=op.Workers(4, 2)), decode_work=op.prepare(
        inputs["kv_lens"], inputs["block_tables"], inputs["cu_q_lens"], inputs["num_decode"],
        num_tokens=2, block_size=16, tiling=op.Tiling(chunk=128, workers=op.Workers(4, 2)),
    ).decode_work)  # fmt: skip
    with pytest.raises(NotImplementedError, match="scales are for a cache of float8_e4m3fn, got bfloat16"):
        mosaic_gpu.attend(q, k, v, cache, plan, scale=1.0, k_scale=0.5)


# Bytes of registers that a thread may store, at most over all programs: prefill with a head of 256, decode of fp8 with
# 11 query heads per KV head; 72 and 16 are the most with Llama's heads.
SPILLED = {"paged_decode": 0, "paged_decode_combine": 0, "paged_decode_fp8": 120, "paged_prefill": 348}
HAS_CUDA_PLUGIN = any(
    importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
)


@pytest.mark.skipif(
    not HAS_CUDA_PLUGIN, reason="needs jax's CUDA plugin to compile for a GPU (no GPU): the extra cuda13"
)
def test_compiles_for_an_h200():
    """In a process of its own: cache in place, no KV-sized temporary, no serialised products."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    command = [sys.executable, str(HERE / "compile_for_h200.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stdout + result.stderr
    assert "C7510" not in said and "C7513" not in said
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 12
    for report in reports:
        assert report["alias"] == report["cache"], report
        assert report["temp"] < report["cache"] / 4, report
        assert report["copies"] == 0, report
        assert report["same_text"], "lowered again, it would not be found in the compilation cache"
    found: dict[str, int] = {}
    pattern = r"entry function '(\w+)_mosaic_gpu_kernel'.*?(\d+) bytes spill stores"
    for kernel, stores in re.findall(pattern, said, re.DOTALL):
        found[kernel] = max(found.get(kernel, 0), int(stores))
    assert found.keys() == SPILLED.keys()
    assert {kernel: stores for kernel, stores in found.items() if stores > SPILLED[kernel]} == {}
