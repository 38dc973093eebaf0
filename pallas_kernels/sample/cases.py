"""Settings and logits that drive this op's tests and benchmarks: written once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.sample.api import Cuts, Settings

VOCABULARY = 151936


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch, all of its rows alike.

    Attributes:
      logits: "normal", with a deviation of 2, as random weights make them; "zipf", as those of a trained model.
      dtype: of the logits.
      cuts: whether the program has any.
      bar: the longest time on an H200, in microseconds.
    """

    name: str
    rows: int = 256  # R
    size: int = VOCABULARY  # V
    logits: str = "normal"
    dtype: str = "float32"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    cuts: bool = True
    bar: float | None = None


BENCH_CASES = (
    Case("greedy_256", temperature=0, cuts=False, bar=70),
    Case("full_256", temperature=0.8, top_k=50, top_p=0.9, bar=200),
    Case("temperature_256", cuts=False, bar=250),
    Case("greedy_1", rows=1, temperature=0, cuts=False, bar=15),
    Case("full_1", rows=1, temperature=0.8, top_k=50, top_p=0.9, bar=30),
    Case("temperature_zipf_256", logits="zipf", temperature=0.6, cuts=False, bar=250),
    Case("greedy_with_cuts_256", temperature=0),
    Case("top_p_zipf_256", logits="zipf", top_p=0.9),
    Case("greedy_32", rows=32, temperature=0, cuts=False),
    Case("full_32", rows=32, temperature=0.8, top_k=50, top_p=0.9),
    Case("greedy_bfloat16_256", dtype="bfloat16", temperature=0, cuts=False),
    Case("full_bfloat16_256", dtype="bfloat16", temperature=0.8, top_k=50, top_p=0.9),
    Case("top_p_normal_256", top_p=0.9, bar=1000),
)


def make_settings(case: Case, seed: int = 0) -> Settings:
    """What the rows ask for; seeds and positions differ from row to row."""
    rows = case.rows
    cuts = Cuts(
        top_k=jnp.full(rows, case.top_k, jnp.int32),
        top_p=jnp.full(rows, case.top_p, jnp.float32),
        min_p=jnp.full(rows, case.min_p, jnp.float32),
    )
    return Settings(
        temperature=jnp.full(rows, case.temperature, jnp.float32),
        seed=jnp.arange(rows, dtype=jnp.int32) + seed,
        position=jnp.arange(rows, dtype=jnp.int32) + 9,
        cuts=cuts if case.cuts else None,
    )


def make_logits(case: Case, key: jax.Array) -> jax.Array:
    """[R, V], in a form that can be compiled."""
    first, second = jax.random.split(key)
    normal = jax.random.normal(first, (case.rows, case.size), jnp.float32)
    if case.logits == "normal":
        x = 2 * normal
    else:
        rank = jax.random.uniform(second, normal.shape, jnp.float32) * case.size + 1
        x = -1.6 * jnp.log(rank) + 0.3 * normal
    return x.astype(case.dtype)


def kept(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool[V]: which tokens of one row may be drawn, by a sort. f32[V]."""
    hot = (x - x.max()) / np.float32(temperature)
    keep = hot >= np.sort(hot)[-min(top_k, len(x))] if top_k else np.ones(len(x), bool)
    if top_p < 1:
        order = np.argsort(-hot, kind="stable")
        mass = np.cumsum(np.where(keep, np.exp(hot.astype(np.float64)), 0)[order])
        keep = keep & (hot >= hot[order[np.searchsorted(mass, np.float32(top_p) * mass[-1])]])
    with np.errstate(divide="ignore"):
        return keep & (hot >= np.log(np.float32(min_p)))
