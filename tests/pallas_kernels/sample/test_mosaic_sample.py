"""The Hopper sampling: interpreted on the CPU against the reference, and compiled for an H200 without one."""

import functools
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.sample import Cuts, Settings, mosaic_gpu, noise, reference
from octavo.pallas_kernels.sample.cases import Case, kept, make_logits
from octavo.pallas_kernels.sample.mosaic_passes import span_for

SIZE, DRAWABLE, UNROLL = 2026, 2019, 2  # four tiles of 512, the last of them over the one before
NEG_INF = float("-inf")


@functools.cache
def program(size=SIZE, drawable=DRAWABLE, room=1024, unroll=UNROLL):
    return jax.jit(
        functools.partial(mosaic_gpu.sample, drawable=drawable, interpret=True, unroll=unroll, room=room)
    )  # fmt: skip


@functools.cache
def truth(drawable=DRAWABLE):
    return jax.jit(functools.partial(reference.sample, drawable=drawable))


def settings(*rows, cuts=True, seed=5):
    """(temperature, top_k, top_p, min_p) of each row."""
    columns = np.array(rows, np.float32).T
    limits = Cuts(*(jnp.asarray(c, d) for c, d in zip(columns[1:], (jnp.int32, jnp.float32, jnp.float32), strict=True)))
    ids = jnp.arange(len(rows), dtype=jnp.int32)
    return Settings(jnp.asarray(columns[0]), ids * 3 + seed, ids + 9, limits if cuts else None)


def logits(rows, kind="normal", dtype="float32"):
    return make_logits(Case("", rows=rows, size=SIZE, logits=kind, dtype=dtype), jax.random.key(1))


def numbers(drawn):
    return jax.tree.map(np.asarray, drawn)


MIXED = (
    (0, 0, 1, 0), (1, 50, 1, 0), (0.6, 0, 0.9, 0), (1.5, 50, 0.3, 0.02), (0.8, 900, 0.95, 0), (1, 0, 1, 0.05),
    (1, 1, 1, 0), (1, 0, 1, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "room"), [("zipf", "float32", 1024), ("normal", "bfloat16", 1024), ("normal", "float32", 64)]
)
def test_tokens_are_those_of_the_reference(kind, dtype, room):
    """A short list sends most rows through the passes that need none. The last row has a temperature alone."""
    x, asked = logits(len(MIXED), kind, dtype), settings(*MIXED)
    drawn, wanted = numbers(program(room=room)(x, asked)), numbers(truth()(x, asked))
    assert drawn.token[:-1].tolist() == wanted.token[:-1].tolist() and drawn.token[-1] < DRAWABLE
    chances = np.asarray(jax.nn.log_softmax(x.astype(jnp.float32)))
    np.testing.assert_allclose(drawn.logprob, chances[np.arange(len(MIXED)), drawn.token], rtol=1e-5)
    assert drawn.finite.all()
    for row, one in enumerate(MIXED):
        if one[0]:
            assert kept(np.asarray(x[row, :DRAWABLE], np.float32), *one)[drawn.token[row]], one


def test_a_temperature_alone_draws_a_part_and_then_an_id():
    """By hand: the part by its weight and its own noise, the id by its logit and the noise of the reference."""
    x, asked = logits(8), settings(*[(t, 0, 1, 0) for t in (0.3, 0.5, 0.7, 1, 1.2, 2, 3, 5)], cuts=False)
    drawn = numbers(program()(x, asked))
    span, (first, second) = span_for(SIZE, DRAWABLE, jnp.float32, UNROLL), noise.keys(asked.seed, asked.position)
    for row, temperature in enumerate(np.asarray(asked.temperature)):
        hot = (np.asarray(x[row]) - np.asarray(x[row, :DRAWABLE]).max()) / temperature
        hot[DRAWABLE:] = NEG_INF
        ends = [int(span.tiles_of(jnp.int32(p))[0]) * span.tile for p in range(span.parts)] + [SIZE]
        weights = np.array([np.exp(hot[a:b]).sum() for a, b in itertools.pairwise(ends)])
        counters = jnp.arange(span.parts, dtype=jnp.uint32) + jnp.uint32(1 << 31)
        part = int(np.argmax(np.log(weights) + np.asarray(noise.gumbel(first[row], second[row], counters))))
        noisy = hot + np.asarray(noise.gumbel(first[row], second[row], jnp.arange(SIZE, dtype=jnp.uint32)))
        assert drawn.token[row] == ends[part] + np.argmax(noisy[ends[part] : ends[part + 1]])


def test_the_distribution_is_the_softmax():
    """A chi-square; the likely ids lie in different parts and lanes."""
    size, rows = 1024, 16
    ids, chances = np.array([3, 500, 520, 1023]), np.array([0.4, 0.3, 0.2, 0.1])
    x = np.full(size, -30.0, np.float32)
    x[ids] = np.log(chances)
    draw = program(size, size, 1024, 1)
    asked = settings(*[(1, 0, 1, 0)] * rows, cuts=False)
    counts = np.zeros(size)
    for i in range(20):
        seeds = jnp.arange(rows, dtype=jnp.int32) + i * rows
        np.add.at(counts, np.asarray(draw(jnp.tile(x, (rows, 1)), asked.replace(seed=seeds)).token), 1)
    expected = 20 * rows * chances
    assert counts[ids].sum() == 20 * rows
    assert ((counts[ids] - expected) ** 2 / expected).sum() < 16.3  # 3 degrees, p = 0.001


def test_extreme_settings():
    """Cuts that keep all or one, temperatures near 0 and far from it."""
    rows = (
        (1, SIZE, 0.9, 0), (1, SIZE + 5, 1, 0.001), (1, 0, 1e-9, 0), (1, 0, 1e-40, 0), (2, 0, 1, 1),
        (1, SIZE - 20, 0.5, 0), (1e-30, 5, 0.5, 0), (100, 7, 1, 0),
    )  # fmt: skip
    x, asked = logits(len(rows)), settings(*rows)
    drawn, wanted = numbers(program(room=64)(x, asked)), numbers(truth()(x, asked))
    assert drawn.token.tolist() == wanted.token.tolist()
    assert (drawn.token[[2, 3, 4, 6]] == np.asarray(x)[[2, 3, 4, 6], :DRAWABLE].argmax(axis=1)).all()


def test_ties_and_masks():
    """Equal logits stay together at a threshold; what is masked is not drawn, unless nothing else is there."""
    x = np.array(logits(8))
    x[0] = 1.5
    x[1] = np.round(x[1])
    x[2] = np.round(x[2])
    masked = x.copy()
    masked[3, : SIZE // 2] = NEG_INF
    masked[4, : DRAWABLE - 5] = NEG_INF
    masked[5] = NEG_INF
    asked = settings(
        (1, 4, 1, 0), (1, 5, 1, 0), (1, 0, 0.5, 0), (1, 0, 0.7, 0), (1, 20, 1, 0), (1, 0, 1, 0), *[(0, 0, 1, 0)] * 2
    )  # fmt: skip
    drawn, wanted = (
        numbers(op(jnp.asarray(x), asked, adjusted=jnp.asarray(masked))) for op in (program(room=64), truth())
    )
    assert drawn.token[:5].tolist() == wanted.token[:5].tolist()
    assert drawn.token[3] >= SIZE // 2 and DRAWABLE - 5 <= drawn.token[4] < DRAWABLE and 0 <= drawn.token[5] < DRAWABLE
    assert drawn.finite.all(), "of the model's own logits"
    np.testing.assert_allclose(drawn.logprob[:5], wanted.logprob[:5], rtol=1e-5)


@pytest.mark.parametrize("cuts", [False, True])
def test_rows_keep_to_themselves(cuts):
    """NaN and infinities end their row alone, and a row's place says nothing."""
    rows = [(0, 0, 1, 0), (1, 0, 1, 0), (1, 30 * cuts, 0.8, 0), (0.5, 0, 0.9, 0)]
    n = len(rows)
    x, asked = logits(n), settings(*rows, cuts=cuts)
    bad = np.array(x)
    bad[:, 7], bad[-1, 7] = np.nan, np.inf
    bad[0] = np.nan
    back = np.arange(n)[::-1]
    both = jax.tree.map(lambda s: jnp.concatenate([s, s]), asked)
    first = numbers(program()(jnp.concatenate([x, x]), both))
    both = jax.tree.map(lambda s: s[::-1], both)
    drawn = numbers(program()(jnp.asarray(np.concatenate([bad, x])[::-1]), both))
    assert drawn.finite.tolist() == [True] * n + [False] * n
    assert (drawn.token[:n] == first.token[back]).all() and (drawn.logprob[:n] == first.logprob[back]).all()
    assert ((drawn.token >= 0) & (drawn.token < SIZE)).all()


def test_a_program_with_cuts_draws_what_one_without_draws():
    x, rows = logits(8), [(t, 0, 1, 0) for t in (0, 0.3, 0.6, 0.9, 1, 1.2, 1.5, 4)]
    without, with_cuts = (numbers(program()(x, settings(*rows, cuts=cuts))) for cuts in (False, True))
    assert (without.token == with_cuts.token).all() and (without.logprob == with_cuts.logprob).all()


def test_noise_is_that_of_jax():
    seed, position = jnp.array([0, 7, -1], jnp.int32), jnp.array([0, 3, 100_000], jnp.int32)
    first, second = noise.keys(seed, position)
    ids = jnp.arange(1000, dtype=jnp.uint32)
    for row in range(3):
        key = jax.random.fold_in(jax.random.key(seed[row].astype(jnp.uint32)), position[row])
        assert np.asarray(jax.random.key_data(key)).tolist() == [int(first[row]), int(second[row])]
        assert (noise.gumbel(first[row], second[row], ids) == jax.random.gumbel(key, (1000,))).all()
    assert -np.log(-np.log1p(-(2.0**-23))) < noise.LARGEST


def test_shapes_that_the_kernels_lack_are_refused():
    assert mosaic_gpu.supports(size=151936, dtype="float32") is None
    assert mosaic_gpu.supports(size=128256, dtype="bfloat16") is None
    assert "float16" in mosaic_gpu.supports(size=151936, dtype="float16")
    assert "4096" in mosaic_gpu.supports(size=1000, dtype="float32")
    with pytest.raises(NotImplementedError, match="vocabulary"):
        mosaic_gpu.sample(jnp.zeros((1, 96)), settings((0, 0, 1, 0)), drawable=96)
    assert span_for(151936, 151936, jnp.float32).parts < 128


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("jax_plugins.xla_cuda13"),
    reason="needs jax's CUDA plugin to compile for a GPU (no GPU): the extra cuda13",
)
def test_it_compiles_for_an_h200():
    """Four kernels and nothing that a CUDA graph could not hold; no register spills; the same text each time."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    script = pathlib.Path(__file__).with_name("compile_sample.py")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [report["kernels"] for report in reports] == [2, 4, 5]
    for report in reports:
        assert not report["loops"] and report["same_text"] and report["temp"] < 20_000_000, report
    spilled = [line for line in (result.stdout + result.stderr).splitlines() if "bytes spill" in line]
    assert spilled and all("0 bytes spill stores, 0 bytes spill loads" in line for line in spilled)
