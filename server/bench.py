"""`octavo bench`: the two workloads that engines are compared by, on random token ids.

Every output has exactly the asked length (EOS is ignored) and nothing is decoded. Refuses to guess:
lengths that the model does not allow are an error of the request.
"""

import dataclasses
import datetime
import json
import math
import pathlib
import random
import statistics
import time
from typing import Any

from octavo.engine import Engine, SamplingParams, environment

MAX_TOKEN_ID = 100_000  # prompts use ids below, so that vocabularies of different sizes get the same ones


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Many requests at once.

    Attributes:
      num_prompts: how many.
      input_len, output_len: lowest and highest number of tokens, drawn uniformly: first all
        input lengths, then all output lengths, then the prompts.
      temperature: 0 is greedy.
      seed: of lengths and prompts.
    """

    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    temperature: float
    seed: int

    def measure(self, engine: Engine) -> dict[str, Any]:
        """Results by name."""
        rng = random.Random(self.seed)
        inputs = [rng.randint(*self.input_len) for _ in range(self.num_prompts)]
        outputs = [rng.randint(*self.output_len) for _ in range(self.num_prompts)]
        prompts = [_random_prompt(rng, engine, length) for length in inputs]
        params = [_params(length, self.temperature) for length in outputs]
        engine.generate([prompts[0][:8]], _params(4, self.temperature), use_tqdm=False)  # first calls are slower
        begin = time.perf_counter()
        results = engine.generate(prompts, params)
        elapsed = time.perf_counter() - begin
        num_output = sum(len(result.outputs[0].token_ids) for result in results)
        return {
            "elapsed_s": elapsed,
            "requests_per_s": self.num_prompts / elapsed,
            "total_tokens_per_s": (sum(inputs) + num_output) / elapsed,
            "output_tokens_per_s": num_output / elapsed,
            "num_input_tokens": sum(inputs),
            "num_output_tokens": num_output,
            "num_cached_tokens": sum(result.num_cached_tokens for result in results),
            "num_preemptions": engine.core.scheduler.stats.num_preemptions,
        }


@dataclasses.dataclass(frozen=True)
class Latency:
    """One batch at a time, again and again.

    Attributes:
      batch_size: requests that start together.
      input_len, output_len: tokens of each.
      num_iters, num_iters_warmup: measured batches, and those before.
      temperature: 0 is greedy.
      seed: of the prompts.
    """

    batch_size: int
    input_len: int
    output_len: int
    num_iters: int
    num_iters_warmup: int
    temperature: float
    seed: int

    def measure(self, engine: Engine) -> dict[str, Any]:
        """Results by name; times in milliseconds."""
        rng = random.Random(self.seed)
        prompts = [_random_prompt(rng, engine, self.input_len) for _ in range(self.batch_size)]
        for _ in range(self.num_iters_warmup):
            self._run(engine, prompts)
        batches, firsts, per_token, cached = [], [], [], 0
        for _ in range(self.num_iters):
            seconds, first, last, num_cached = self._run(engine, prompts)
            batches.append(seconds * 1e3)
            firsts += [value * 1e3 for value in first]
            if self.output_len > 1:
                spans = zip(first, last, strict=True)
                per_token += [(end - start) * 1e3 / (self.output_len - 1) for start, end in spans]
            cached += num_cached
        return {
            **_percentiles("latency_ms", batches),
            **_percentiles("time_to_first_token_ms", firsts),
            **(_percentiles("time_per_output_token_ms", per_token) if per_token else {}),
            "output_tokens_per_s": self.batch_size * self.output_len / statistics.mean(batches) * 1e3,
            "num_cached_tokens": cached,
        }

    def _run(self, engine: Engine, prompts: list[list[int]]) -> tuple[float, list[float], list[float], int]:
        """Seconds of the whole batch, until each request's first and last token, and cached tokens."""
        params = _params(self.output_len, self.temperature)
        begin = time.perf_counter()
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        num_cached, open_requests = 0, len(ids)
        while open_requests:
            pieces, outputs = engine.step()
            now = time.perf_counter() - begin
            for piece in pieces:
                if piece.token_ids:
                    first.setdefault(piece.request_id, now)
                    last[piece.request_id] = now
            num_cached += sum(output.num_cached_tokens for output in outputs)
            open_requests -= len(outputs)
        return time.perf_counter() - begin, [first[i] for i in ids], [last[i] for i in ids], num_cached


def run(workload: Throughput | Latency, options: dict[str, Any], json_file: str | None) -> dict[str, Any]:
    """Starts an engine, measures, prints a table, and writes JSON where asked to."""
    begin = time.perf_counter()
    with Engine(**options) as engine:
        ready = time.perf_counter() - begin
        results = workload.measure(engine)
        report = {
            "benchmark": type(workload).__name__.lower(),
            "model": engine.config.model,
            "workload": dataclasses.asdict(workload),
            "results": {**results, "start_to_ready_s": ready},
            "programs": engine.num_programs,
            "kv_blocks": engine.core.num_blocks,
            "options": dataclasses.asdict(engine.config),
            "resolved": dataclasses.asdict(engine.core.resolved),
            "environment": environment.describe(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    _print_table(report)
    if json_file is not None:
        pathlib.Path(json_file).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _random_prompt(rng: random.Random, engine: Engine, length: int) -> list[int]:
    highest = min(MAX_TOKEN_ID, engine.core.model_config.vocab_size) - 1
    return [rng.randint(0, highest) for _ in range(length)]


def _params(output_len: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(percent: float) -> float:
        """Nearest rank."""
        return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]

    return {f"{name}_mean": statistics.mean(ordered), **{f"{name}_p{p}": at(p) for p in (50, 90, 99)}}


def _print_table(report: dict[str, Any]) -> None:
    about = report["environment"]
    print(f"\n{report['benchmark']}  {report['model']}  {about['devices']}  jax {about['jax']}  {about['commit'][:12]}")
    print("  " + "  ".join(f"{name} {value}" for name, value in report["workload"].items()))
    for name, value in report["results"].items():
        print(f"  {name:<34}{value:>14,.2f}" if isinstance(value, float) else f"  {name:<34}{value:>14,}")
