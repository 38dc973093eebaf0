"""Finds the kernels' parameters for the device that this runs on.

python -m octavo.pallas_kernels.tune [--head-sizes 128 ...] [--kv-dtypes bfloat16 ...] [--out FOLDER] [--seconds 500]

One group of parameters after another: each candidate is timed on the cases of cases.py that it
matters to, with the best values so far in the other groups, and the one with the lowest mean of log
times is kept if it gains at least 1 %. A candidate that does not compile or whose error is too large
is skipped and named. The result goes to tuned/<device>.json, which is shipped with the package.
"""

import argparse
import dataclasses
import datetime
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import tqdm

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.ragged_paged_attention import dispatch
from octavo.pallas_kernels.ragged_paged_attention.cases import BENCH_CASES, RAGGED_CASES, Case
from octavo.pallas_kernels.ragged_paged_attention.parameters import DEFAULT, Parameters
from octavo.pallas_kernels.ragged_paged_attention.timing import heads_of, make_bench, relative_error
from octavo.pallas_kernels.timing import versions

OP = dispatch.OP
LEAST_GAIN = 0.01
ERROR_LIMITS = {1: 3e-2, 2: 5e-3}  # by bytes of a stored number
FAILURES = (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)  # of a compiler, by experience


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are tried together.

    Attributes:
      candidates: what to change in the best parameters so far.
      cases: names of BENCH_CASES to time.
      check: name of the one of RAGGED_CASES whose error must hold.
    """

    candidates: tuple[dict[str, int | None], ...]
    cases: tuple[str, ...]
    check: str


def _each(**values: tuple[int | None, ...]) -> tuple[dict[str, int | None], ...]:
    """Values of some parameters, side by side."""
    return tuple(dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))


GROUPS = (
    Group(
        _each(decode_tile=(64, 64, 64, 64, 128, 128, 128), decode_stages=(1, 2, 3, 4, 1, 2, None)),
        ("decode_256x1024", "decode_32x1024", "decode_1x8192"),
        "ragged_decode",
    ),
    Group(_each(blocks_per_core=(2,)), ("decode_256x1024", "decode_32x1024", "prefill_8x1024"), "ragged_mixed"),
    Group(_each(longest=(1024, 2048, 8192)), ("decode_128x4096", "decode_16x8192", "decode_skewed"), "ragged_decode"),
    Group(_each(shortest=(64, 256, 512)), ("decode_32x1024", "decode_1x8192", "decode_1x1024"), "ragged_decode"),
    Group(
        _each(combine_at_once=(4, 8, 16, 32, 16, 16), combine_blocks=(8, 8, 4, 8, 2, 16)),
        ("decode_16x8192", "decode_1x8192", "decode_skewed"),
        "ragged_decode",
    ),
    Group(
        _each(prefill_tile=(64, 64, 64, 128, 128), prefill_stages=(2, 3, 4, 2, 3)),
        ("prefill_1x8192", "prefill_8x1024", "chunk_512_on_16k"),
        "ragged_prefill",
    ),
)


class Stopped(Exception):
    """The time given is over."""


def search(
    groups: tuple[Group, ...],
    measure: Callable[[str, Parameters], float],
    check: Callable[[str, Parameters], str | None],
    skipped: Callable[[dict[str, int | None], str], None],
) -> tuple[Parameters, float]:
    """The best parameters and how much faster they are, as a mean of log times over all cases.

    Args:
      groups: in the order in which they are tried.
      measure: seconds of a case with some parameters; may raise one of FAILURES.
      check: why the results with some parameters cannot be used, or None.
      skipped: told of each candidate that cannot be used, and why.
    """
    best, gain = DEFAULT, 0.0
    for group in groups:
        try:
            base = [measure(name, best) for name in group.cases]
            top, chosen = LEAST_GAIN, best
            for change in group.candidates:
                candidate = dataclasses.replace(best, **change)  # type: ignore[arg-type]
                if candidate == best:
                    continue
                try:
                    times = [measure(name, candidate) for name in group.cases]
                    reason = check(group.check, candidate)
                except FAILURES as error:
                    reason = (str(error).strip() or repr(error)).splitlines()[0]
                if reason is not None:
                    skipped(change, reason)
                    continue
                faster = sum(math.log(a / b) for a, b in zip(base, times, strict=True)) / len(base)
                if faster > top:
                    top, chosen = faster, candidate
        except Stopped:
            break
        if chosen != best:
            best, gain = chosen, gain + top * len(group.cases)
    return best, gain / sum(len(group.cases) for group in groups)


class Tuner:
    """Times and checks the attention op for one head size and type of cache.

    Args:
      head_size: H.
      kv_dtype: of the cache.
      bar: moves by one for each time taken.
      deadline: by time.monotonic, when to stop.
    """

    def __init__(self, head_size: int, kv_dtype: str, bar: Any, deadline: float) -> None:
        cases = (*BENCH_CASES, *RAGGED_CASES)
        self.cases = {c.name: dataclasses.replace(c, head_size=head_size, kv_dtype=kv_dtype) for c in cases}
        self.bar, self.deadline = bar, deadline
        self.times: dict[tuple[str, Parameters], float] = {}

    def measure(self, name: str, parameters: Parameters) -> float:
        """Seconds of one call."""
        if (name, parameters) not in self.times:
            if time.monotonic() > self.deadline:
                raise Stopped
            bench = self._bench(self.cases[name], parameters)
            self.times[name, parameters] = bench.seconds(bench.compile(), *bench.inputs())
        self.bar.update()
        return self.times[name, parameters]

    def check(self, name: str, parameters: Parameters) -> str | None:
        """Why the results cannot be used, or None."""
        bench = self._bench(self.cases[name], parameters)
        q, cache = bench.inputs()
        error, limit = relative_error(bench, q, cache), ERROR_LIMITS[cache.dtype.itemsize]
        return None if error <= limit else f"relative error {error:.1e}, at most {limit:.1e} is right"

    def skipped(self, change: dict[str, int | None], why: str) -> None:
        """Says it above the bar."""
        self.bar.write(f"{change} skipped: {why}")

    def _bench(self, case: Case, parameters: Parameters) -> Any:
        device = jax.devices()[0]
        chosen = dispatch.hopper(heads_of(case), device, parameters)
        if isinstance(chosen, str):
            raise NotImplementedError(chosen)
        return make_bench(case, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-sizes", nargs="*", type=int, default=[128])
    parser.add_argument("--kv-dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--out", type=pathlib.Path, default=tuning.FOLDER, help="the folder of the results")
    parser.add_argument("--seconds", type=float, default=500, help="stop after so many")
    args = parser.parse_args()
    device = jax.devices()[0]
    if isinstance(refusal := dispatch.hopper(heads_of(BENCH_CASES[0]), device, DEFAULT), str):
        raise SystemExit(f"nothing to tune on {device.device_kind}: {refusal}")
    head = {
        "device": device.device_kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
    }
    deadline = time.monotonic() + args.seconds
    path = tuning.path_for(device.device_kind, args.out)
    steps = sum(len(group.cases) * (1 + len(group.candidates)) for group in GROUPS)
    for head_size in args.head_sizes:
        for kv_dtype in args.kv_dtypes:
            with tqdm.tqdm(total=steps, desc=f"{OP}, head size {head_size}, {kv_dtype}") as bar:
                tuner = Tuner(head_size, kv_dtype, bar, deadline)
                best, gain = search(GROUPS, tuner.measure, tuner.check, tuner.skipped)
            changed = {k: v for k, v in dataclasses.asdict(best).items() if v != getattr(DEFAULT, k)}
            print(f"head size {head_size}, {kv_dtype}: {changed or 'the defaults'}, {gain:.1%} faster on average")
            entry = {
                "for": {"head_size": head_size, "kv_dtype": kv_dtype},
                "parameters": dataclasses.asdict(best),
                "gain": round(gain, 4),
            }
            tuning.write(path, head, OP, [entry])
    print(path)


if __name__ == "__main__":
    main()
