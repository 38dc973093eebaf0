"""Speed and error of the kernels: one row per case, and a JSON file of rows.

python -m benchmarks.kernels [--cases NAME ...] [--out benchmarks/results/h200/kernels.json] [--commit HASH]

Each case is called several times in one jitted program, on blocks of a pool of more than 220 MB, so
that nothing comes from the L2 cache, and each call waits for the one before (pallas_kernels/timing.py).
`tbps` counts the keys and values read once; `tfps` the products inside the causal mask; `ratio` is to
the ceiling measured in the same run: the better of a copy and a reduction, or a bfloat16 matrix
product. `rel_err` is the norm of the difference to a float32 softmax over the norm of that; for sampling,
the share of tokens that a sort-based reference would not draw. Rows
named torch_… are the same case through what torch ships, where torch and a GPU are here. A run
replaces the rows of its own cases in the file; what stays from another commit or day says so itself.
"""

import argparse
import concurrent.futures
import datetime
import gc
import importlib.util
import os
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.report import merge_rows
from benchmarks.sample_kernels import CASES as SAMPLE_CASES
from benchmarks.sample_kernels import run_sampling
from octavo.pallas_kernels.ragged_paged_attention.cases import BENCH_CASES, RAGGED_CASES, Case
from octavo.pallas_kernels.ragged_paged_attention.dispatch import Implementation, choose
from octavo.pallas_kernels.ragged_paged_attention.timing import (
    Bench,
    flops,
    heads_of,
    kv_bytes,
    make_bench,
    relative_error,
)
from octavo.pallas_kernels.timing import Ceilings, measure_ceilings, versions

COMPILERS = 8  # threads


def attention_values(case: Case, seconds: float, ceilings: Ceilings) -> dict[str, float]:
    """The metrics of one time: FLOP/s where every row is a prefill, else bytes/s."""
    if all(q_len > 1 for q_len, _ in case.rows):
        rate, unit, ceiling = flops(case) / seconds, "tfps", ceilings.product
    else:
        rate, unit, ceiling = kv_bytes(case) / seconds, "tbps", ceilings.memory
    return {"us": seconds * 1e6, unit: rate / 1e12, "ratio": rate / ceiling}


def implementation(case: Case, name: str) -> Implementation:
    device = jax.devices()[0]
    return choose(name, device.platform, heads_of(case), device)


def run_attention(
    cases: list[Case], name: str, ceilings: Ceilings, torch: str, report: Callable[[str, dict[str, float]], None]
) -> None:
    """Times and checks cases; everything is compiled before anything is timed."""
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        ready = list(pool.map(lambda case: _ready(case, name), cases))
    for case, found in zip(cases, ready, strict=True):
        if isinstance(found, str):
            print(f"{case.name}: not compiled: {found}", flush=True)
            continue
        bench, one, program = found
        q, cache = bench.inputs()
        values = {}
        if program is not None:
            values = attention_values(case, bench.seconds(program, q, cache), ceilings)
        values["rel_err"] = relative_error(bench, q, cache, one)
        report(case.name, values)
        del q, cache
        gc.collect()
        if torch != "none" and program is not None:
            from benchmarks import torch_attention

            if (best := torch_attention.fastest(case, flex=torch == "flex")) is not None:
                report(f"torch_{case.name}", attention_values(case, best[0], ceilings))
                print(f"    torch: {best[1]}", flush=True)


def _ready(case: Case, name: str) -> tuple[Bench, Any, Any] | str:
    """(batch, single call, timed program or None for a case that is only checked); or why it does not compile."""
    try:
        bench = make_bench(case, implementation(case, name))
        return bench, bench.compile_one(), None if case in RAGGED_CASES else bench.compile()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]


def has_torch() -> bool:
    if importlib.util.find_spec("torch") is None or jax.devices()[0].platform != "gpu":
        return False
    import torch

    return torch.cuda.is_available()


def git_commit() -> str:
    """What is checked out; "uncommitted" where there is no repository, "… (working tree)" where files differ."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not (commit := git("rev-parse", "HEAD")):
        return "uncommitted"
    return f"{commit} (working tree)" if git("status", "--porcelain", "--untracked-files=no") else commit


def header(commit: str, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "ceilings": {
            "copy_tbps": ceilings.copy / 1e12,
            "read_tbps": ceilings.read / 1e12,
            "bf16_tfps": ceilings.product / 1e12,
        },
    }


def main() -> None:
    names = [*SAMPLE_CASES, *(case.name for case in (*BENCH_CASES, *RAGGED_CASES))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=pathlib.Path, help="the file to merge rows into")
    parser.add_argument("--commit", default=os.environ.get("OCTAVO_COMMIT"), help="by default $OCTAVO_COMMIT or git's")
    parser.add_argument("--attention", default="auto", help="the implementation")
    parser.add_argument(
        "--torch",
        choices=("none", "eager", "flex"),
        default="eager",
        help="torch's attention: leave it out, or try flex_attention too, whose compilation takes long",
    )
    args = parser.parse_args()
    started = time.monotonic()
    ceilings = measure_ceilings()
    top = header(args.commit or git_commit(), ceilings)
    print("  ".join(f"{name} {value:.4g}" for name, value in top["ceilings"].items()), flush=True)
    rows: list[dict[str, Any]] = []

    def report(case: str, values: dict[str, float]) -> None:
        print(f"{case:28s} " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
        rows.extend({"case": case, "metric": metric, "value": value} for metric, value in values.items())
        if args.out is not None:
            merge_rows(args.out, top, rows)

    wanted = set(args.cases or names)
    cases = [case for case in (*BENCH_CASES, *RAGGED_CASES) if case.name in wanted]
    run_sampling([case for case in SAMPLE_CASES if case in wanted], ceilings, report)
    run_attention(cases, args.attention, ceilings, args.torch if has_torch() else "none", report)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
