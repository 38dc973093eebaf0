"""The paged attention op against dense softmax, with NaN wherever nothing valid is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.cache import KVKind, KVSpec
from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import reference
from octavo.pallas_kernels.ragged_paged_attention.cases import SMALL_CASES, Case, make_inputs

SCALE = 0.25


def dense_attention(case: Case, inputs: dict) -> np.ndarray:
    """Row by row, no pages, no tricks."""
    out = np.zeros_like(inputs["q"])
    group = case.num_heads // case.num_kv_heads
    for r, (q_len, length) in enumerate(case.rows):
        at = inputs["cu_q_lens"][r]
        keys, values = (np.repeat(x, group, axis=1) for x in inputs["dense"][r])
        scores = np.einsum("tnh,lnh->ntl", inputs["q"][at : at + q_len], keys) * SCALE
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        q_position, kv_position = np.arange(length - q_len, length)[:, None], np.arange(length)[None]
        mask = np.full((q_len, length), True)
        if case.causal:
            mask &= kv_position <= q_position
        if case.window:
            mask &= kv_position > q_position - case.window
        scores = np.where(mask, scores, -np.inf)
        if case.sinks:
            sink = np.broadcast_to(inputs["sinks"][:, None, None], (case.num_heads, q_len, 1))
            scores = np.concatenate([scores, sink], axis=-1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True))[..., :length]
        out[at : at + q_len] = np.einsum("ntl,lnh->tnh", p, values)
    return out


def run(case: Case, inputs: dict, **scales) -> tuple[np.ndarray, np.ndarray]:
    @jax.jit
    def f(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, sinks):
        plan = op.prepare(
            kv_lens,
            block_tables,
            cu_q_lens,
            num_decode,
            num_tokens=case.num_tokens,
            block_size=case.block_size,
            tiling=case.tiling,
            causal=case.causal,
        )
        return reference.attend(
            q, k, v, cache, plan, scale=SCALE, causal=case.causal, window=case.window,
            soft_cap=case.soft_cap, sinks=sinks, **scales,
        )  # fmt: skip

    out, cache = f(**{name: value for name, value in inputs.items() if name != "dense"})
    return np.asarray(out), np.asarray(cache)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda c: c.name)
def test_matches_dense_attention(case):
    inputs = make_inputs(case)
    out, cache = run(case, inputs)
    real = inputs["cu_q_lens"][-1]
    np.testing.assert_allclose(out[:real], dense_attention(case, inputs)[:real], atol=2e-6)
    assert not out[real:].any(), "padded tokens give zeros"
    for r, (_, length) in enumerate(case.rows):
        for position in range(length):
            block = inputs["block_tables"][r, position // case.block_size]
            np.testing.assert_array_equal(
                cache[block, :, :, position % case.block_size], inputs["dense"][r][:, position]
            )
    used = {0} | set(inputs["block_tables"].ravel().tolist())
    foreign = [b for b in range(len(cache)) if b not in used]
    assert np.isnan(cache[foreign]).all(), "blocks of others were not written"


def test_rows_do_not_depend_on_neighbours():
    """Bitwise, within one program: another order, other company."""
    case = next(c for c in SMALL_CASES if c.name == "decode")
    inputs = make_inputs(case)
    alone, _ = run(case, inputs)
    order = np.array([6, 2, 0, 5, 1, 3, 4])
    shuffled = dict(inputs)
    for name in ("q", "k", "v"):
        shuffled[name] = inputs[name].copy()
        shuffled[name][:7] = inputs[name][order]
    for name in ("kv_lens", "block_tables"):
        shuffled[name] = inputs[name].copy()
        shuffled[name][:7] = inputs[name][order]
    out, _ = run(case, shuffled)
    np.testing.assert_array_equal(out[:7], alone[order])
    fewer = dict(shuffled, kv_lens=shuffled["kv_lens"].copy(), cu_q_lens=np.minimum(inputs["cu_q_lens"], 2))
    fewer["kv_lens"][2:] = 0
    fewer["num_decode"] = np.int32(2)
    out, _ = run(case, fewer)
    np.testing.assert_array_equal(out[:2], alone[order[:2]])


def test_reads_another_layers_cache():
    """k = None attends to what is there already."""
    case = next(c for c in SMALL_CASES if c.name == "mixed")
    inputs = make_inputs(case)
    out, cache = run(case, inputs)
    again, same = run(case, dict(inputs, k=None, v=None, cache=cache))
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(cache, same)


def test_scales():
    """Stored values times the scales are the values; a number or one per head."""
    case = next(c for c in SMALL_CASES if c.name == "mixed")
    inputs = make_inputs(case)
    expected = dense_attention(case, inputs)
    scales = {"k_scale": jnp.array([0.5, 4.0]), "v_scale": 2.0}
    stored = inputs["cache"] / np.array([[0.5, 4.0], [2.0, 2.0]], np.float32)[None, :, :, None, None]
    out, _ = run(case, dict(inputs, cache=stored), **scales)
    real = inputs["cu_q_lens"][-1]
    np.testing.assert_allclose(out[:real], expected[:real], atol=5e-6)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("name", ["decode", "mixed", "mixed_window", "mixed_sinks_soft_cap"])
def test_fp8_cache(name, form):
    """Values that fp8 holds exactly come back exactly, as an array of that type or of its bytes; NaN elsewhere."""
    case = next(c for c in SMALL_CASES if c.name == name)
    inputs = make_inputs(case)
    scales = np.array([[0.5, 4.0], [2.0, 2.0]], np.float32)  # [2, K]: powers of 2, so that exact stays exact

    def rounded(x: np.ndarray, side_axis: int) -> np.ndarray:
        """What comes back of x, whose axes from side_axis on are 2, K, …"""
        by = scales.reshape(2, 2, *[1] * (x.ndim - side_axis - 2))
        return np.asarray((x / by).astype(jnp.float8_e4m3fn).astype(np.float32) * by)

    inputs["dense"] = [rounded(dense.swapaxes(0, 1), 1).swapaxes(0, 1) for dense in inputs["dense"]]
    stored = jnp.asarray(inputs["cache"] / scales[:, :, None, None]).astype(jnp.float8_e4m3fn)
    given = stored if form == "float8_e4m3fn" else stored.view(jnp.uint8)
    out, cache = run(case, dict(inputs, cache=given), k_scale=jnp.asarray(scales[0]), v_scale=jnp.float32(2.0))
    real = inputs["cu_q_lens"][-1]
    np.testing.assert_allclose(out[:real], dense_attention(case, inputs)[:real], atol=5e-6)
    assert not out[real:].any() and cache.dtype == given.dtype
    read = cache.view(jnp.float8_e4m3fn).astype(np.float32) * scales[:, :, None, None]
    for r, (_, length) in enumerate(case.rows):
        position = np.arange(length)
        block = inputs["block_tables"][r, position // case.block_size]
        found = read[block, :, :, position % case.block_size]  # [length, 2, K, H]
        np.testing.assert_array_equal(found.swapaxes(0, 1), inputs["dense"][r])


def test_fp8_saturates():
    """Beyond the largest number of e4m3, 448, the largest is kept; a plain conversion would give NaN."""
    case = next(c for c in SMALL_CASES if c.name == "decode_one_row")
    inputs = make_inputs(case)
    shape = inputs["k"].shape
    k, v = np.full(shape, 1e6, np.float32), np.full(shape, -1e6, np.float32)
    _, cache = run(case, dict(inputs, k=k, v=v, cache=jnp.asarray(inputs["cache"]).astype(jnp.float8_e4m3fn)))
    position = case.rows[0][1] - 1
    block = inputs["block_tables"][0, position // case.block_size]
    written = cache[block, :, :, position % case.block_size].astype(np.float32)
    assert (written[0] == 448).all() and (written[1] == -448).all()


def test_work_follows_the_tokens_attended():
    """Inner iterations, counted: no more than the tokens need, plus one group's longest row."""
    tiling = op.Tiling(chunk=32, decode_group=4, tile=8, prefill_group=1)
    lengths = [1000] + [20] * 15
    for pool_width in (64, 512):
        plan = op.prepare(
            jnp.array(lengths, jnp.int32),
            jnp.zeros((16, pool_width), jnp.int32),
            jnp.arange(17, dtype=jnp.int32),
            jnp.int32(16),
            num_tokens=16,
            block_size=16,
            tiling=tiling,
        )
        chunks = np.asarray(plan.decode.num_chunks).reshape(-1, 4)
        visited = int(chunks[:, 0].sum()) * 4
        needed = sum(-(-n // 32) for n in lengths)
        assert visited <= needed + 3 * -(-1000 // 32)


def test_cache_is_written_in_place():
    """The donated cache is the result: no copy of it among the temporaries."""
    case = dataclasses.replace(SMALL_CASES[0], head_size=64)
    inputs = make_inputs(case, num_blocks=2000)

    def f(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode):
        plan = op.prepare(
            kv_lens, block_tables, cu_q_lens, num_decode, num_tokens=case.num_tokens, block_size=16, tiling=case.tiling
        )
        return reference.attend(q, k, v, cache, plan, scale=SCALE)

    arguments = {name: inputs[name] for name in inputs if name not in ("dense", "sinks")}
    compiled = jax.jit(f, donate_argnames="cache").lower(**arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == inputs["cache"].nbytes
    assert memory.temp_size_in_bytes < inputs["cache"].nbytes / 10


def test_choose_and_refuse():
    assert op.choose("auto", "cpu").name == "reference"
    with pytest.raises(ConfigError, match="attention_backend"):
        op.choose("flash", "cpu")
    with pytest.raises(ConfigError, match="key_size"):
        op.cache_spec(KVSpec(num_kv_heads=2, key_size=192, value_size=128), 4, 16)
    with pytest.raises(ValueError, match="window"):
        KVSpec(num_kv_heads=2, key_size=64, value_size=64, kind=KVKind.SLIDING)


def test_whole_blocks_in_and_out():
    cache = jnp.arange(6 * 2 * 2 * 16 * 8, dtype=jnp.float32).reshape(6, 2, 2, 16, 8)
    before = np.asarray(cache)
    copied = np.asarray(jax.jit(op.copy_blocks)(cache, jnp.array([1, 2]), jnp.array([2, 5])))
    np.testing.assert_array_equal(copied[[2, 5]], before[[1, 2]])
    np.testing.assert_array_equal(copied[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    contents = jax.jit(op.read_blocks)(cache, jnp.array([4, 0]))
    np.testing.assert_array_equal(contents, before[[4, 0]])
    moved = np.asarray(jax.jit(op.write_blocks)(jnp.zeros_like(cache), jnp.array([1, 3]), contents))
    np.testing.assert_array_equal(moved[[1, 3]], before[[4, 0]])
    assert not moved[[0, 2, 4, 5]].any()
    donated = jax.jit(op.copy_blocks, donate_argnums=0).lower(cache, jnp.array([1]), jnp.array([2])).compile()
    assert donated.memory_analysis().alias_size_in_bytes == cache.nbytes
