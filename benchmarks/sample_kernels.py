"""The sampling rows of kernels.py: from f32 logits [256, 151936] to tokens, checked against a sort in the same run."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.devices import is_hopper
from octavo.pallas_kernels.sample import choose, reference
from octavo.pallas_kernels.sample.api import Cuts, Sample, Settings
from octavo.pallas_kernels.timing import Ceilings, seconds_per_call

ROWS, VOCABULARY = 256, 151936
CALLS = 8
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
CASES = ("sample_greedy", "sample_full")


def implementation(vocabulary: int) -> Sample:
    """The Mosaic one where it can run, which is what these rows are about."""
    device = jax.devices()[0]
    backend = "mosaic_gpu" if is_hopper(device) else "reference"
    return choose(backend, device.platform, vocabulary, device).sample


def settings_for(case: str, rows: int) -> Settings:
    greedy = case == "sample_greedy"
    cuts = None
    if not greedy:
        cuts = Cuts(
            top_k=jnp.full((rows,), TOP_K, jnp.int32), top_p=jnp.full((rows,), TOP_P), min_p=jnp.zeros((rows,))
        )  # fmt: skip
    return Settings(
        temperature=jnp.full((rows,), 0.0 if greedy else TEMPERATURE),
        seed=jnp.arange(rows, dtype=jnp.int32),
        position=jnp.arange(rows, dtype=jnp.int32) * 7,
        cuts=cuts,
    )


def run_sampling(
    cases: list[str],
    ceilings: Ceilings,
    report: Callable[[str, dict[str, float]], None],
    rows: int = ROWS,
    vocabulary: int = VOCABULARY,
) -> None:
    """Times and checks cases; `rel_err` is the share of rows whose token is not that of the reference, or not kept."""
    size = rows * vocabulary * 4
    copies = CALLS  # the same logits twice, and the compiler would read them once
    made = jax.jit(lambda key: jax.random.normal(key, (rows, vocabulary)) * 3)
    logits = tuple(made(key) for key in jax.random.split(jax.random.key(0), copies))
    one = jax.jit(functools.partial(implementation(vocabulary), drawable=vocabulary))
    for case in cases:
        settings = settings_for(case, rows)
        seconds = _seconds(one, logits, settings)
        token = one(logits[0], settings).token
        expected = jax.jit(functools.partial(reference.sample, drawable=vocabulary))(logits[0], settings).token
        wrong = np.asarray(token != expected) | ~_kept(np.asarray(logits[0]), np.asarray(token), case)
        rate = size / seconds
        values = {"us": seconds * 1e6, "tbps": rate / 1e12, "ratio": rate / ceilings.memory}
        report(case, values | {"rel_err": float(wrong.mean())})


def _seconds(one: Callable[..., jax.Array], logits: tuple[jax.Array, ...], settings: Settings) -> float:
    """Of one call; each takes its positions from the tokens of the one before.

    A call's first pass waits for none of that, so the graph is told to run one kernel after another.
    """
    serial = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if jax.devices()[0].platform == "gpu" else None

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=serial)
    def program(position: jax.Array, logits: tuple[jax.Array, ...], settings: Settings) -> jax.Array:
        for i in range(CALLS):
            drawn = one(logits[i % len(logits)], dataclasses.replace(settings, position=position))
            position = drawn.token
        return position

    state = [jnp.copy(settings.position)]

    def run() -> jax.Array:
        state[0] = program(state[0], logits, settings)
        return state[0]

    return seconds_per_call(run, CALLS)


def _kept(logits: np.ndarray, token: np.ndarray, case: str) -> np.ndarray:
    """Whether each row's token is one that a sort keeps: bool[R]."""
    value = np.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    if case == "sample_greedy":
        return np.asarray(value == logits.max(axis=1))
    likely = -np.sort(-np.partition(logits, -TOP_K, axis=1)[:, -TOP_K:], axis=1)
    weight = np.exp((likely - likely[:, :1]).astype(np.float64) / TEMPERATURE)
    before = np.cumsum(weight, axis=1) - weight  # of what is likelier
    count = (before < TOP_P * weight.sum(axis=1, keepdims=True)).sum(axis=1)
    lowest = np.take_along_axis(likely, count[:, None] - 1, axis=1)[:, 0]
    return np.asarray(value >= lowest)
