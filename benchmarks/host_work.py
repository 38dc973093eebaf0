"""Host time of a step at 256 decode rows: schedule, pack and dispatch, commit. Waiting for the device is left out.

    python -m benchmarks.host_work [--rows 256] [--steps 100]

The model is small but has as many layers, and so as many arrays a dispatch, as SmolLM2.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

from benchmarks.report import print_table, use_cores, write_row

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
PHASES = ("schedule", "pack and dispatch", "mark dispatched", "commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    use_cores(options.cores)
    times = measure(options.rows, options.steps)
    medians = {phase: statistics.median(values) * 1e3 for phase, values in times.items()}
    total = statistics.median(map(sum, zip(*times.values(), strict=True))) * 1e3
    print_table(
        [
            (f"{options.rows} decode rows, median of {options.steps} steps", "ms", "bar"),
            *((phase, f"{value:.3f}", "") for phase, value in medians.items()),
            ("host work a step", f"{total:.3f}", "<= 2.000"),
        ]
    )
    row = {"rows": options.rows, "steps": options.steps, "total_ms": round(total, 3)}
    row |= {f"{phase.replace(' ', '_')}_ms": round(value, 3) for phase, value in medians.items()}
    print(f"written to {write_row('host_work', row)}")


def measure(rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each phase, step by step, with every row decoding."""
    from octavo.configs.engine import EngineConfig
    from octavo.engine.core import EngineCore
    from octavo.engine.request import Request, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        core = EngineCore(
            EngineConfig(
                model=folder,
                load_format="dummy",
                max_model_len=512,
                max_num_seqs=rows,
                max_num_batched_tokens=rows * 4,
                num_gpu_blocks_override=1 + rows * 32,
                decode_rungs=(rows,),
                token_rungs=(rows * 4,),
                warmup="full",
            )
        )
    params = SamplingParams(max_tokens=steps + 50, ignore_eos=True, temperature=0.7, seed=1)
    for i in range(rows):
        core.add(Request(request_id=str(i), prompt_token_ids=[5 + i % 300, 7, 9], params=params))
    while core.scheduler.num_waiting or (core.has_unfinished and core.scheduler.num_running < rows):
        core.step()
    for _ in range(20):
        core.step()
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(steps):  # EngineCore.step, with a clock between its verbs
        t0 = time.perf_counter()
        plan = core.scheduler.plan()
        if plan is None or plan.num_decode != rows:
            raise SystemExit("a step did not decode every row")
        t1 = time.perf_counter()
        core.in_flight.append((plan, core.runner.launch(plan)))
        t2 = time.perf_counter()
        core.scheduler.dispatched(plan)
        t3 = time.perf_counter()
        plan, sampled = core.in_flight.popleft()
        sampled.rows.block_until_ready()
        t4 = time.perf_counter()
        core.scheduler.commit(plan, core.runner.fetch(sampled))
        t5 = time.perf_counter()
        for phase, value in zip(PHASES, (t1 - t0, t2 - t1, t3 - t2, t5 - t4), strict=True):
            times[phase].append(value)
    core.close()
    return times


if __name__ == "__main__":
    main()
