"""Batches of this op that are timed, for benchmarks and tuning; what they read rotates over more than the L2 cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.ragged_paged_attention import api
from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan
from octavo.pallas_kernels.ragged_paged_attention.cases import Case
from octavo.pallas_kernels.ragged_paged_attention.dispatch import Heads, Implementation
from octavo.pallas_kernels.ragged_paged_attention.kv_write import as_stored
from octavo.pallas_kernels.timing import POOL_BYTES, seconds_per_call

MAX_MODEL_LEN = 9216
FP8_SCALE = 0.25
BLOCK_BYTES = 100_000_000  # KV of one call from which few calls suffice


def heads_of(case: Case) -> Heads:
    """What the op is asked for in this case."""
    return Heads(
        case.num_heads, case.num_kv_heads, case.head_size, case.block_size, "bfloat16", case.kv_dtype
    )  # fmt: skip


def kv_bytes(case: Case) -> int:
    """Keys and values, read once."""
    size = jnp.dtype(case.kv_dtype).itemsize
    return sum(length for _, length in case.rows) * case.num_kv_heads * case.head_size * 2 * size


def flops(case: Case) -> int:
    """Products inside the causal mask."""
    pairs = sum(q_len * (length - q_len) + q_len * (q_len + 1) // 2 for q_len, length in case.rows)
    return 4 * pairs * case.num_heads * case.head_size


def prefills(case: Case) -> bool:
    return any(q_len > 1 for q_len, _ in case.rows)


def calls_of(case: Case) -> int:
    """Calls in one program: short ones must hide the dispatch."""
    if prefills(case):
        return 6
    return 10 if kv_bytes(case) > BLOCK_BYTES else 64


@dataclasses.dataclass(frozen=True)
class Bench:
    """One batch per copy, each in blocks of its own of one pool, and the program that attends to all in turn.

    Attributes:
      case: what it is.
      calls: in one program.
      plan: numpy; that of every copy, but for the block tables.
      tables: i32[R, P'] per copy.
      attend: (q, cache, plan) -> out.
      cache_shape: of the pool.
    """

    case: Case
    calls: int
    plan: AttentionPlan
    tables: tuple[np.ndarray, ...]
    attend: Callable[..., jax.Array]
    cache_shape: tuple[int, ...]

    def compile(self, placed: jax.sharding.Sharding | None = None) -> Any:
        """The timed program: (q, cache, plan, tables) -> out, in q's place.

        Each call's queries are the result of the one before.

        Args:
          placed: another device than the default one.
        """
        one = jax.jit(self.attend)  # lowers the kernels once, not once a call

        def program(q: jax.Array, cache: jax.Array, plan: AttentionPlan, tables: tuple[jax.Array, ...]) -> jax.Array:
            for i in range(self.calls):
                q = one(q, cache, dataclasses.replace(plan, block_tables=tables[i % len(tables)]))
            return q

        q, cache, plan = self._arguments(placed)
        tables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), self.tables)
        return jax.jit(program, donate_argnums=0).lower(q, cache, plan, tables).compile()

    def compile_one(self) -> Any:
        """A single call: (q, cache, plan) -> out."""
        return jax.jit(self.attend).lower(*self._arguments(None)).compile()

    def _arguments(self, placed: jax.sharding.Sharding | None) -> tuple[Any, Any, Any]:
        case, array = self.case, functools.partial(jax.ShapeDtypeStruct, sharding=placed)
        return (
            array((case.num_tokens, case.num_heads, case.head_size), jnp.bfloat16),
            array(self.cache_shape, api.cache_dtype(case.kv_dtype)),
            jax.tree.map(lambda x: array(x.shape, x.dtype), self.plan),
        )

    def inputs(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """(q, cache) on the device."""
        keys = jax.random.split(jax.random.key(seed), 2)
        case = self.case

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

        q = normal(keys[0], (case.num_tokens, case.num_heads, case.head_size), jnp.dtype(jnp.bfloat16))
        cache = normal(keys[1], self.cache_shape, jnp.dtype(case.kv_dtype))
        return q, jax.lax.bitcast_convert_type(cache, api.cache_dtype(case.kv_dtype))

    def seconds(self, compiled: Any, q: jax.Array, cache: jax.Array) -> float:
        """Of one call."""
        plan, tables = jax.device_put((self.plan, self.tables))
        state = [jnp.copy(q)]

        def run() -> jax.Array:
            state[0] = compiled(state[0], cache, plan, tables)
            return state[0]

        return seconds_per_call(run, self.calls)


def make_bench(case: Case, chosen: Implementation, *, calls: int | None = None, seed: int = 0) -> Bench:
    """Lays a case out in a pool of random blocks.

    Args:
      case: sizes.
      chosen: the implementation; its cache must be of the form [blocks, 2, K, S, H].
      calls: in one program; by default what hides the dispatch.
      seed: of the order of blocks.
    """
    calls = calls or calls_of(case)
    rng = np.random.default_rng(seed)
    blocks = [-(-length // case.block_size) for _, length in case.rows]
    size = jnp.dtype(case.kv_dtype).itemsize
    block_bytes = 2 * case.num_kv_heads * case.block_size * case.head_size * size
    copies = min(calls, max(1, -(-POOL_BYTES // (sum(blocks) * block_bytes))))
    width = max(MAX_MODEL_LEN // case.block_size, *blocks)
    order = rng.permutation(np.arange(1, copies * sum(blocks) + 1, dtype=np.int32))
    tables = np.zeros((copies, case.num_rows, width), np.int32)
    parts = np.split(order, np.cumsum(blocks * copies)[:-1])
    for i, part in enumerate(parts):
        tables[i // len(blocks), i % len(blocks), : len(part)] = part
    q_lens, kv_lens = np.zeros((2, case.num_rows), np.int32)
    q_lens[: len(case.rows)], kv_lens[: len(case.rows)] = np.array(case.rows).T
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    num_decode = np.int32(sum(q_len == 1 for q_len, _ in case.rows))
    prepare = jax.jit(
        functools.partial(
            api.prepare, num_tokens=case.num_tokens, block_size=case.block_size, tiling=chosen.tiling
        )
    )  # fmt: skip
    plan = jax.tree.map(np.asarray, prepare(kv_lens, tables[0], cu_q_lens, num_decode))
    padding = ((0, 0), (0, 0), (0, plan.block_tables.shape[1] - width))
    scales = {"k_scale": FP8_SCALE, "v_scale": FP8_SCALE} if size == 1 else {}
    scale = case.head_size**-0.5

    def attend(q: jax.Array, cache: jax.Array, plan: AttentionPlan) -> jax.Array:
        return chosen.attend(q, None, None, cache, plan, scale=scale, **scales)[0]

    shape = (copies * sum(blocks) + 1, 2, case.num_kv_heads, case.block_size, case.head_size)
    return Bench(case, calls, plan, tuple(np.pad(tables, padding)), attend, shape)


def relative_error(
    bench: Bench, q: jax.Array, cache: jax.Array, one: Any = None, *, rows: int = 8, samples: int = 32
) -> float:
    """Norm of the difference to a float32 softmax over norm of that, on sampled queries of sampled rows.

    `one`: what `compile_one` gave, where it is there already.
    """
    case = bench.case
    out = (one or bench.compile_one())(q, cache, bench.plan)
    rng = np.random.default_rng(1)
    starts = np.concatenate([[0], np.cumsum([q_len for q_len, _ in case.rows])])
    last = len(case.rows) - 1
    width = max(-(-length // case.block_size) for _, length in case.rows)
    unit = FP8_SCALE if cache.dtype.itemsize == 1 else 1.0

    @jax.jit
    def squares(
        q: jax.Array, out: jax.Array, cache: jax.Array, table: jax.Array, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        kv = jnp.moveaxis(as_stored(cache[table]).astype(jnp.float32) * unit, 1, 0)  # [2, P, K, S, H]
        keys, values = jnp.swapaxes(kv, 2, 3).reshape(2, -1, case.num_kv_heads, case.head_size)
        mine = q[token].astype(jnp.float32).reshape(token.shape[0], case.num_kv_heads, -1, case.head_size)
        s = jnp.einsum("tkgh,lkh->kgtl", mine, keys, precision="highest") * case.head_size**-0.5
        s = jnp.where((jnp.arange(keys.shape[0])[None, :] <= position[:, None])[None, None], s, -jnp.inf)
        expected = jnp.einsum("kgtl,lkh->tkgh", jax.nn.softmax(s, axis=-1), values, precision="highest")
        got = out[token].astype(jnp.float32).reshape(expected.shape)
        return jnp.sum((got - expected) ** 2), jnp.sum(expected**2)

    sums = []
    for r in sorted({0, last, *rng.choice(last + 1, min(rows, last + 1), replace=False).tolist()}):
        q_len, length = case.rows[r]
        at = np.concatenate([[0, q_len - 1], rng.integers(0, q_len, samples - 2)]).astype(np.int32)
        table = bench.tables[0][r, :width]
        sums.append(squares(q, out, cache, table, np.int32(starts[r]) + at, np.int32(length - q_len) + at))
    difference, norm = np.sum(jax.device_get(sums), axis=0)
    return float((difference / norm) ** 0.5)
