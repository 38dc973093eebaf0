"""Speed and error of the attention kernels: one row per case, and a JSON file of rows.

python benchmarks/kernels.py [--only NAME ...] [--out benchmarks/results/h200/kernels.json]

Each case is called several times in one jitted program, on different blocks of a pool of more than
200 MB, so that nothing comes from the L2 cache; several programs are queued, and the time is the
median over repetitions of their whole time divided by the calls. `tbps` counts the keys and values
read once; `tfps` counts the products inside the causal mask; `ratio` is to the ceiling measured in
the same run (a reduction over 4 GB, a bf16 matrix product). `rel_err` is the norm of the difference
to a float32 softmax over sampled queries.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import mosaic_gpu
from octavo.pallas_kernels.ragged_paged_attention.cases import BENCH_CASES, Case

SCALE = 128**-0.5
POOL_BYTES = 220e6
MAX_MODEL_LEN = 9216
WORKERS = 264


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A pool of blocks, and one batch per copy, each in blocks of its own."""

    q: tuple[jax.Array, ...]
    k: jax.Array
    v: jax.Array
    cache: jax.Array
    plans: tuple[op.AttentionPlan, ...]
    tables: np.ndarray  # [copies, R, P]


def make(case: Case, calls: int, seed: int = 0, workers: op.Workers | None = None) -> Inputs:
    rng = np.random.default_rng(seed)
    blocks = [-(-length // case.block_size) for _, length in case.rows]
    block_bytes = 2 * case.num_kv_heads * case.block_size * case.head_size * 2
    copies = min(calls, max(1, int(np.ceil(POOL_BYTES / (sum(blocks) * block_bytes)))))
    width = max(MAX_MODEL_LEN // case.block_size, max(blocks))
    order = rng.permutation(np.arange(1, copies * sum(blocks) + 1))
    tables = np.zeros((copies, case.num_rows, width), np.int32)
    at = 0
    for copy in range(copies):
        for r, count in enumerate(blocks):
            tables[copy, r, :count] = order[at : at + count]
            at += count
    q_lens = np.zeros(case.num_rows, np.int32)
    kv_lens = np.zeros(case.num_rows, np.int32)
    q_lens[: len(case.rows)], kv_lens[: len(case.rows)] = np.array(case.rows).T
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    num_decode = np.int32(sum(q_len == 1 for q_len, _ in case.rows))
    tiling = op.Tiling(chunk=128, workers=workers or op.Workers(WORKERS, case.num_kv_heads))
    prepare = jax.jit(
        functools.partial(op.prepare, num_tokens=case.num_tokens, block_size=case.block_size, tiling=tiling)
    )
    plans = tuple(prepare(kv_lens, table, cu_q_lens, num_decode) for table in tables)
    keys = jax.random.split(jax.random.key(seed), 8)
    shape = (case.num_tokens, case.num_heads, case.head_size)
    fresh = -(-calls // copies)  # as many queries as make every call another one
    q = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(keys[0], fresh))
    new = (case.num_tokens, case.num_kv_heads, case.head_size)
    cache_shape = (copies * sum(blocks) + 1, 2, case.num_kv_heads, case.block_size, case.head_size)
    return Inputs(
        q=q, k=jax.random.normal(keys[1], new, jnp.bfloat16), v=jax.random.normal(keys[2], new, jnp.bfloat16),
        cache=jax.jit(lambda key: jax.random.normal(key, cache_shape, jnp.bfloat16))(keys[3]),
        plans=plans, tables=tables,
    )  # fmt: skip


def seconds_per_call(program: Any, calls: int, queued: int = 8, repeats: int = 7) -> float:
    """Median time of one call, with programs queued so that the device never waits for the host."""
    jax.block_until_ready(program())
    jax.block_until_ready(program())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(queued):
            last = program()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / (queued * calls))
    return statistics.median(times)


def time_case(case: Case, inputs: Inputs, calls: int, blocks: int) -> float:
    copies = len(inputs.plans)
    plans = jax.tree.map(np.asarray, inputs.plans)  # constants: hundreds of arguments cost host time

    @jax.jit  # lowers the kernels once, not once a call
    def attend(q: jax.Array, cache: jax.Array, plan: op.AttentionPlan) -> jax.Array:
        return mosaic_gpu.attend(q, None, None, cache, plan, scale=SCALE, blocks=blocks)[0]

    @jax.jit
    def program(q: tuple[jax.Array, ...], cache: jax.Array) -> list[jax.Array]:
        return [attend(q[i // copies], cache, plans[i % copies]) for i in range(calls)]

    return seconds_per_call(lambda: program(inputs.q, inputs.cache), calls)


def time_write(case: Case, inputs: Inputs, calls: int) -> float:
    """The write of new keys and values alone, in place."""
    plans = jax.tree.map(np.asarray, inputs.plans)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(cache: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for i in range(calls):
            cache = mosaic_gpu.write(cache, k + i, v, plans[i % len(plans)])
        return cache

    state = [inputs.cache + 0]

    def run() -> jax.Array:
        state[0] = program(state[0], inputs.k, inputs.v)
        return state[0]

    return seconds_per_call(run, calls)


def relative_error(case: Case, inputs: Inputs, samples: int = 64) -> float:
    out, _ = jax.jit(functools.partial(mosaic_gpu.attend, scale=SCALE))(
        inputs.q[0], None, None, inputs.cache, inputs.plans[0]
    )
    rng = np.random.default_rng(1)

    @jax.jit
    def dense(q: jax.Array, kv: jax.Array, position: jax.Array) -> jax.Array:
        kv = jnp.moveaxis(kv.astype(jnp.float32), 1, 0)  # [2, P, K, S, H]
        keys, values = jnp.swapaxes(kv, 2, 3).reshape(2, -1, case.num_kv_heads, case.head_size)
        q = q.astype(jnp.float32).reshape(q.shape[0], case.num_kv_heads, -1, case.head_size)
        s = jnp.einsum("tkgh,lkh->kgtl", q, keys, precision="highest") * SCALE
        s = jnp.where(jnp.arange(keys.shape[0])[None, :] <= position[:, None], s, -jnp.inf)
        p = jax.nn.softmax(s, axis=-1)
        return jnp.einsum("kgtl,lkh->tkgh", p, values, precision="highest").reshape(q.shape[0], -1, case.head_size)

    difference = norm = 0.0
    starts = np.concatenate([[0], np.cumsum([q_len for q_len, _ in case.rows])])
    rows = sorted({0, len(case.rows) - 1, *rng.integers(0, len(case.rows), 6).tolist()})
    for r in rows:
        q_len, length = case.rows[r]
        at = np.concatenate([[0, q_len - 1], rng.integers(0, q_len, samples)])[: min(samples, q_len)]
        table = inputs.tables[0, r, : -(-length // case.block_size)]
        expected = dense(inputs.q[0][starts[r] + at], inputs.cache[table], length - q_len + at)
        got = out[starts[r] + at].astype(jnp.float32)
        difference += float(jnp.sum((got - expected) ** 2))
        norm += float(jnp.sum(expected**2))
    return (difference / norm) ** 0.5


def kv_bytes(case: Case) -> int:
    return sum(length for _, length in case.rows) * case.num_kv_heads * case.head_size * 2 * 2


def flops(case: Case) -> int:
    pairs = sum(q_len * (length - q_len) + q_len * (q_len + 1) // 2 for q_len, length in case.rows)
    return 4 * pairs * case.num_heads * case.head_size


def ceilings() -> tuple[float, float]:
    """(bytes/s read by a reduction, FLOP/s of a bf16 product) of this device."""
    big = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
    reduce = jax.jit(lambda x: [jnp.max(jnp.abs(x))])
    read = 2**32 / seconds_per_call(lambda: reduce(big), 1)
    del big
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    return read, 2 * 8192**3 / seconds_per_call(lambda: product(a, b), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--blocks", type=int, default=WORKERS // 2)
    parser.add_argument("--no-error", action="store_true")
    args = parser.parse_args()
    read, compute = ceilings()
    print(f"ceilings: read {read / 1e12:.2f} TB/s, bf16 product {compute / 1e12:.0f} TF/s", flush=True)
    rows = []
    for case in BENCH_CASES:
        if args.only and case.name not in args.only:
            continue
        prefills = any(q_len > 1 for q_len, _ in case.rows)
        calls = 6 if prefills else 10 if kv_bytes(case) > 100e6 else 64  # short ones must hide the dispatch
        inputs = make(case, calls)
        error = float("nan") if args.no_error else relative_error(case, inputs)
        spent = time_case(case, inputs, calls, args.blocks)
        write = time_write(case, inputs, calls)
        only_prefill = prefills and all(q_len > 1 for q_len, _ in case.rows)
        rate = ("tfps", flops(case) / spent / 1e12) if only_prefill else ("tbps", kv_bytes(case) / spent / 1e12)
        ratio = rate[1] * 1e12 / (compute if only_prefill else read)
        values = {"us": spent * 1e6, rate[0]: rate[1], "ratio": ratio, "rel_err": error, "write_us": write * 1e6}
        print(f"{case.name:18s} " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
        rows += [{"case": case.name, "metric": m, "value": values[m]} for m in values if m != "write_us"]
        rows.append({"case": f"write_{case.name}", "metric": "us", "value": write * 1e6})
        if args.out is not None:
            _save(args.out, rows, read, compute)


def _save(path: pathlib.Path, rows: list[dict[str, Any]], read: float, compute: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = jax.devices()[0]
    report = {
        "commit": commit or "uncommitted",
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "platform": device.client.platform_version.strip().splitlines()[0]},
        "ceilings": {"read_tbps": read / 1e12, "bf16_tfps": compute / 1e12},
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
