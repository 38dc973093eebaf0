"""The Hopper attention: interpreted on the CPU against the reference, and compiled for an H200 without one."""

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import dispatch, mosaic_gpu, reference
from octavo.pallas_kernels.ragged_paged_attention.cases import Case, make_inputs
from octavo.pallas_kernels.ragged_paged_attention.worklist import plan_decode

HERE = pathlib.Path(__file__).parent
BLOCKS = 2  # of the interpreted grid
DECODE = tuple((1, n) for n in (1, 300, 64, 65, 17))
MIXED = ((1, 5), (1, 140), (130, 130), (7, 151))
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
CASES = (
    Case("decode", DECODE, 8, 8, **HEADS),
    Case("decode_group_of_3", DECODE[:2], 3, 3, num_heads=6, num_kv_heads=2, head_size=128, block_size=32),
    Case("decode_window_sinks", DECODE[:3], 4, 4, window=40, soft_cap=5.0, sinks=True, **HEADS),
    Case("mixed", MIXED, 152, 6, num_heads=2, num_kv_heads=1, head_size=64),
    Case(
        "mixed_window_sinks",
        MIXED,
        144,
        6,
        num_heads=8,
        num_kv_heads=8,
        head_size=64,
        window=30,
        soft_cap=5.0,
        sinks=True,
    ),
    Case("bidirectional", ((140, 140), (7, 7)), 152, 4, num_heads=2, num_kv_heads=1, head_size=64, causal=False),
)


def attend(case: Case, inputs: dict, interpreted: bool) -> tuple[np.ndarray, np.ndarray]:
    workers = op.Workers(2 * BLOCKS, case.num_kv_heads, longest=128) if interpreted else None
    tiling = dataclasses.replace(case.tiling, chunk=128, workers=workers)

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
            soft_cap=case.soft_cap, sinks=sinks, **options,
        )  # fmt: skip

    dtype = jnp.bfloat16 if interpreted else jnp.float32
    arrays = {name: jnp.asarray(inputs[name], jnp.bfloat16).astype(dtype) for name in ("q", "k", "v", "cache")}
    out, cache = f(**{name: value for name, value in inputs.items() if name != "dense"} | arrays)
    return np.asarray(out, np.float32), np.asarray(cache, np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
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


def test_choose_and_refuse():
    heads = dispatch.Heads(32, 8, 128, 16, "bfloat16", "bfloat16")
    assert dispatch.choose("auto", "cpu", heads, jax.devices()[0]).name == "reference"
    with pytest.raises(ConfigError, match="compute capability"):
        dispatch.choose("mosaic_gpu", "cpu", heads, jax.devices()[0])

    hopper = unittest.mock.Mock(spec=jax.Device, platform="gpu", compute_capability="9.0", core_count=132)
    chosen = dispatch.choose("auto", "gpu", heads, hopper)
    assert chosen.name == "mosaic_gpu"
    assert chosen.tiling.workers == op.Workers(264, 8)
    for change in ({"head_size": 80}, {"block_size": 8}, {"dtype": "float32"}, {"kv_dtype": "float8_e4m3fn"}):
        assert dispatch.choose("auto", "gpu", dataclasses.replace(heads, **change), hopper).name == "reference"


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
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "C7510" not in result.stdout + result.stderr and "C7513" not in result.stdout + result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 3
    for report in reports:
        assert report["alias"] == report["cache"], report
        assert report["temp"] < report["cache"] / 4, report
        assert report["copies"] == 0, report
        assert report["same_text"], "lowered again, it would not be found in the compilation cache"
