"""Asks a running `octavo serve` with OpenAI's client and prints the answer as it comes.

    octavo serve MODEL &
    python examples/client.py "Name three rivers."

Needs `pip install openai`. The key, if the server wants one, comes from $OCTAVO_API_KEY.
"""

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("OCTAVO_API_KEY") or "none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        max_completion_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"repetition_penalty": 1.1},  # a field of vLLM's
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    main()
