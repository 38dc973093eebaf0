"""Host time of the scheduler: milliseconds a step for plan + dispatched + commit, decode rows only.

python benchmarks/scheduler.py [--rows 256] [--steps 400] [--logprobs K]
"""

import argparse
import collections
import statistics
import time

import numpy as np

from octavo.configs.scheduler import SchedulerConfig
from octavo.engine.buckets import Ladder
from octavo.engine.kv_groups import KVGroups
from octavo.engine.plan import Plan, SampledHost
from octavo.engine.request import Request, SamplingParams
from octavo.engine.scheduler import Scheduler

PROMPT_LEN, BLOCK_SIZE, VOCAB = 100, 16, 32000


def make_scheduler(rows: int, steps: int) -> Scheduler:
    """A scheduler with room for everything, so that no step preempts or admits."""
    max_len = PROMPT_LEN + 2 * steps
    programs = ((rows, rows, "prompt"), (rows + PROMPT_LEN * rows, rows, "prompt"))
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + PROMPT_LEN * rows,
        max_model_len=max_len,
        vocab_size=VOCAB,
        max_constrained_rows=rows,
    )
    ladder = Ladder(programs=programs, coarse=programs, ready=frozenset(programs))
    return Scheduler(config, ladder, KVGroups([rows * (max_len // BLOCK_SIZE + 2)], [BLOCK_SIZE]))


def measure(rows: int, steps: int, num_logprobs: int | None) -> dict[str, float]:
    """Medians over the steps, in milliseconds, with one step in flight."""
    scheduler = make_scheduler(rows, steps)
    params = SamplingParams(max_tokens=2 * steps, ignore_eos=True, logprobs=num_logprobs)
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = rng.integers(0, VOCAB, PROMPT_LEN).tolist()
        scheduler.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=float(i)))
    top = None if num_logprobs is None else np.zeros((rows, 20))
    sampled = SampledHost(
        tokens=rng.integers(0, VOCAB, (rows, 1), dtype=np.int32),
        num_accepted=np.ones(rows, np.int32),
        finite=np.ones(rows, bool),
        logprobs=np.zeros((rows, 1), np.float32),
        ranks=None if top is None else np.ones(rows, np.int32),
        top_ids=None if top is None else top.astype(np.int32),
        top_logprobs=None if top is None else top.astype(np.float32),
    )
    times: dict[str, list[float]] = collections.defaultdict(list)
    in_flight: collections.deque[Plan] = collections.deque()
    for _ in range(steps):
        t0 = time.perf_counter()
        plan = scheduler.plan()
        t1 = time.perf_counter()
        if plan is None:
            raise RuntimeError("nothing to run")
        scheduler.dispatched(plan)
        t2 = time.perf_counter()
        in_flight.append(plan)
        if len(in_flight) == 2:
            scheduler.commit(in_flight.popleft(), sampled)
            t3 = time.perf_counter()
            for name, seconds in (("plan", t1 - t0), ("dispatched", t2 - t1), ("commit", t3 - t2), ("total", t3 - t0)):
                times[name].append(1e3 * seconds)
    result = {name: statistics.median(values) for name, values in times.items()}
    result["worst"] = sorted(times["total"][8:])[-len(times["total"]) // 100]  # 99th percentile
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--logprobs", type=int, default=None)
    args = parser.parse_args()
    result = measure(args.rows, args.steps, args.logprobs)
    print(f"{args.rows} rows  " + "  ".join(f"{name} {value:.3f} ms" for name, value in result.items()))


if __name__ == "__main__":
    main()
