"""The TPU attention: its cache, write and refusals on the CPU, and compiled for a v5e without one.

jax's interpreters cannot run the kernel that it ships (0.11.2: neither knows a reshaped
reference), so the reference that stands beside that kernel takes its place here.
"""

import dataclasses
import importlib.util
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
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as shipped

from octavo.configs.cache import KVSpec
from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import dispatch, reference, tpu
from octavo.pallas_kernels.ragged_paged_attention.cases import SMALL_CASES, Case, make_inputs

HERE = pathlib.Path(__file__).parent
BY_NAME = {case.name: case for case in SMALL_CASES}
CASES = (
    BY_NAME["decode_block_32"],
    BY_NAME["decode_mqa"],
    dataclasses.replace(BY_NAME["mixed"], num_heads=6, num_kv_heads=3),
    dataclasses.replace(BY_NAME["mixed_window"], name="mixed_window_soft_cap", soft_cap=5.0),
)


def plan_of(case: Case, inputs: dict) -> op.AttentionPlan:
    arrays = {name: jnp.asarray(inputs[name]) for name in ("kv_lens", "block_tables", "cu_q_lens", "num_decode")}
    return op.prepare(**arrays, num_tokens=case.num_tokens, block_size=case.block_size, tiling=case.tiling)


def stand_in(q, cache, kv_lens, tables, cu_q_lens, num_rows, *, num_kv_pages_per_block, num_queries_per_block, **rest):
    """The shipped reference gives real tokens only; what pads a step is left to be anything."""
    assert 0 < num_kv_pages_per_block <= tables.shape[1] and 0 < num_queries_per_block <= len(q)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = shipped.ref_ragged_paged_attention(q, cache, kv_lens, tables, cu_q_lens, num_rows, **rest)
    return jnp.full_like(q, jnp.nan).at[: len(out)].set(out)


def paired(cache: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """[blocks, 2, K, S, H] in the form of the TPU's cache; what pads it is zero."""
    blocks, _, kv_heads, block_size, size = cache.shape
    out = np.zeros(shape, np.float32)
    out[:, :, : 2 * kv_heads, :size] = cache.transpose(0, 3, 2, 1, 4).reshape(blocks, block_size, -1, size)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_matches_the_reference(case, monkeypatch):
    monkeypatch.setattr(tpu, "ragged_paged_attention", stand_in)
    inputs = make_inputs(case)
    inputs["cache"] = np.nan_to_num(inputs["cache"], nan=7.0)  # the shipped reference multiplies masked values
    plan = plan_of(case, inputs)
    q, k, v = (jnp.asarray(inputs[name]) for name in ("q", "k", "v"))
    options = {"scale": 0.25, "window": case.window, "soft_cap": case.soft_cap}
    expected, expected_cache = reference.attend(q, k, v, jnp.asarray(inputs["cache"]), plan, **options)
    spec = tpu.cache_spec(KVSpec(case.num_kv_heads, case.head_size, case.head_size), 96, case.block_size)
    out, cache = tpu.attend(q, k, v, jnp.asarray(paired(inputs["cache"], spec.shape)), plan, **options)
    real = inputs["cu_q_lens"][-1]
    np.testing.assert_allclose(out[:real], expected[:real], atol=5e-6)
    assert not np.asarray(out[real:]).any(), "padded tokens give zeros"
    np.testing.assert_array_equal(cache[1:], paired(np.asarray(expected_cache), spec.shape)[1:])
    again, same = tpu.attend(q, None, None, cache, plan, **options)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(same, cache)


def test_scales_and_an_empty_step(monkeypatch):
    monkeypatch.setattr(tpu, "ragged_paged_attention", stand_in)
    case = BY_NAME["mixed"]
    inputs = make_inputs(case)
    plan = plan_of(case, inputs)
    q, k, v = (jnp.asarray(inputs[name]) for name in ("q", "k", "v"))
    stored = np.nan_to_num(inputs["cache"], nan=7.0)
    spec = tpu.cache_spec(KVSpec(case.num_kv_heads, case.head_size, case.head_size), 96, case.block_size)
    options = {"scale": 0.25, "k_scale": 0.5, "v_scale": 4.0}
    expected, _ = reference.attend(q, k, v, jnp.asarray(stored), plan, **options)
    out, _ = tpu.attend(q, k, v, jnp.asarray(paired(stored, spec.shape)), plan, **options)
    real = inputs["cu_q_lens"][-1]
    np.testing.assert_allclose(out[:real], expected[:real], atol=5e-5)

    nobody = plan_of(case, inputs | {name: np.zeros_like(inputs[name]) for name in ("kv_lens", "cu_q_lens")})
    out, _ = tpu.attend(q, k, v, jnp.asarray(paired(stored, spec.shape)), nobody, scale=0.25)
    assert not np.asarray(out).any()


def test_refuses_by_name():
    case = BY_NAME["decode"]
    inputs = make_inputs(case)
    plan = plan_of(case, inputs)
    cache = jnp.zeros((96, 16, 4, 128))
    attend = jax.tree_util.Partial(tpu.attend, *(jnp.asarray(inputs[name]) for name in ("q", "k", "v")), cache)
    for options, named in (
        ({"sinks": jnp.zeros(6)}, "sinks"),
        ({"causal": False}, "causal"),
        ({"k_scale": jnp.ones(2)}, "scales that are arrays"),
    ):
        with pytest.raises(NotImplementedError, match=named):
            attend(plan, scale=0.25, **options)
    wide = dataclasses.replace(plan, block_tables=jnp.zeros((512, 1024), jnp.int32))
    with pytest.raises(NotImplementedError, match=r"512 rows and 1024 blocks .* larger blocks"):
        attend(wide, scale=0.25)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        tpu.attend(jnp.zeros((8, 6, 16), jnp.float16), None, None, cache, plan, scale=0.25)
    with pytest.raises(NotImplementedError, match="padded KV heads"):
        tpu.attend(jnp.zeros((8, 12, 16)), None, None, jnp.zeros((96, 16, 8, 128)), plan, scale=0.25)
    with pytest.raises(ConfigError, match="key_size"):
        tpu.cache_spec(KVSpec(2, 192, 128), 4, 16)


def test_chosen_on_a_tpu():
    heads = dispatch.Heads(32, 8, 128, 16, "bfloat16", "bfloat16")
    chip = unittest.mock.Mock(spec=jax.Device, platform="tpu")
    chosen = dispatch.choose("auto", "tpu", heads, chip)
    assert chosen.name == "tpu"
    assert chosen.cache_spec(KVSpec(3, 64, 64), 5, 16).shape == (5, 16, 8, 128)
    other = dispatch.choose("auto", "tpu", dataclasses.replace(heads, dtype="float16"), chip)
    assert other.name == "reference" and other.cache_spec is op.cache_spec
    with pytest.raises(ConfigError, match="tpu cannot be used: it needs a TPU"):
        dispatch.choose("tpu", "cpu", heads, jax.devices()[0])


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu (no TPU): the extra tpu")
def test_compiles_for_a_v5e(repository):
    """In a process of its own: cache in place, nothing of its size beside it."""
    import libtpu

    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": libtpu.get_library_path(),
    }
    command = [sys.executable, str(HERE / "compile_for_tpu.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 7
    for report in reports:
        assert report["alias"] == report["cache"], report
        assert report["temp"] < report["cache"] / 4, report
        assert report["copies"] == 0, report
