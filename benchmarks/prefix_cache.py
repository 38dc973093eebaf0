"""A 1,500-token prompt, twice: how much sooner the first token comes the second time. SmolLM2-135M on CPU.

python -m benchmarks.prefix_cache
"""

import argparse
import statistics
import time

from benchmarks.report import print_table, use_cores, write_row
from benchmarks.smollm2_vs_transformers import make_prompts, smollm2_path

LENGTH, OUTPUT_LENGTH, RUNS = 1500, 16, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    use_cores(parser.parse_args().cores)
    from octavo.engine import Engine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LENGTH, ignore_eos=True)
    with Engine(smollm2_path(), dtype="float32", max_model_len=2048, max_num_seqs=4, warmup="full") as engine:

        def first_token(prompt: list[int]) -> tuple[float, list[int]]:
            """Seconds until the first token, and all tokens."""
            started = time.perf_counter()
            seconds, tokens = None, []
            for piece in engine.stream(prompt, params):
                seconds = time.perf_counter() - started if seconds is None else seconds
                tokens += piece.token_ids
            if seconds is None:
                raise SystemExit("the engine gave no token")
            return seconds, tokens

        first_token(make_prompts(1, 9, LENGTH)[0])
        pairs = [(first_token(prompt), first_token(prompt)) for prompt in make_prompts(RUNS, 0, LENGTH)]
    first = statistics.median(seconds for (seconds, _), _ in pairs)
    second = statistics.median(seconds for _, (seconds, _) in pairs)
    same = sum(a == b for (_, a), (_, b) in pairs)
    print_table(
        [
            (f"{LENGTH} tokens in, median of {RUNS}", "first token", "ratio", "bar"),
            ("first time", f"{first * 1e3:.0f} ms", "", ""),
            ("second time", f"{second * 1e3:.0f} ms", f"{second / first:.3f}", "<= 0.250"),
        ]
    )
    print(f"the same {OUTPUT_LENGTH} tokens both times: {same} of {RUNS}")
    row = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "prompt_length": LENGTH,
        "first_ms": round(first * 1e3, 1),
        "second_ms": round(second * 1e3, 1),
        "ratio": round(second / first, 4),
        "same_outputs": f"{same}/{RUNS}",
    }
    print(f"written to {write_row('prefix_cache', row)}")


if __name__ == "__main__":
    main()
