"""Writes the reference outputs: greedy tokens and log-probabilities by transformers on torch, float32, CPU.

Run by `make goldens` in an environment of its own (README.md beside this file). Refuses to import Octavo.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from tests.goldens.torch_reference import load_directory, load_smollm2
from tests.references.tiny_models import MODELS, OUTPUT_LENGTH, TOP, make_prompt, write_checkpoint

FOLDER = pathlib.Path(__file__).parent
SMOLLM2_OUTPUT_LENGTH = 48


@torch.inference_mode()
def golden(model: PreTrainedModel, prompt: list[int], output_length: int) -> dict[str, np.ndarray]:
    """Greedy output (no token ends it) and raw log-probabilities of every position.

    Row i of `chosen`, `top_ids` and `top_logprobs` belongs to token i of prompt and output together, and comes from
    the logits at i - 1; row 0 is empty. `gap` is how far the likeliest output token is ahead of the second.
    """
    ids = list(prompt)
    cache = None
    logits = []
    for _ in range(output_length):
        step = torch.tensor([ids if cache is None else ids[-1:]])
        out = model(input_ids=step, cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits[0].double())
        ids.append(int(logits[-1][-1].argmax()))
    logprobs = torch.log_softmax(torch.cat(logits), dim=-1).numpy()
    top_ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :TOP]
    top = np.take_along_axis(logprobs, top_ids, axis=-1)
    chosen = np.take_along_axis(logprobs, np.array(ids[1:])[:, None], axis=-1)[:, 0]
    first = np.full((1, TOP), np.nan)
    return {
        "prompt": np.array(prompt, np.int32),
        "output": np.array(ids[len(prompt) :], np.int32),
        "chosen": np.append(np.nan, chosen).astype(np.float32),
        "top_ids": np.concatenate([np.zeros((1, TOP)), top_ids]).astype(np.int32),
        "top_logprobs": np.concatenate([first, top]).astype(np.float32),
        "gap": (top[-output_length:, 0] - top[-output_length:, 1]).astype(np.float32),
    }


def make_tiny() -> None:
    (FOLDER / "tiny").mkdir(exist_ok=True)
    for tiny in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(tiny, pathlib.Path(folder))
            result = golden(load_directory(pathlib.Path(folder)), make_prompt(tiny), OUTPUT_LENGTH)
        np.savez_compressed(tiny.golden, **result)
        print(f"{tiny.name:28} smallest gap {result['gap'].min():.4f}  first outputs {result['output'][:6].tolist()}")


def make_smollm2() -> None:
    model, tokenizer = load_smollm2()
    prompts = json.loads((FOLDER / "smollm2_prompts.json").read_text(encoding="utf-8"))
    arrays = {}
    for prompt in prompts:
        ids = encode(tokenizer, prompt)
        result = golden(model, ids, SMOLLM2_OUTPUT_LENGTH)
        arrays |= {f"{prompt['name']}/{key}": value for key, value in result.items()}
        text = tokenizer.decode(result["output"].tolist())
        print(f"{prompt['name']}: {len(ids)} tokens, smallest gap {result['gap'].min():.4f}\n    {text!r}")
    np.savez_compressed(FOLDER / "smollm2.npz", **arrays)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: dict) -> list[int]:
    """Token ids of a raw prompt, or of a conversation in the model's own template."""
    if "text" in prompt:
        return tokenizer.encode(prompt["text"], add_special_tokens=False)
    text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


if __name__ == "__main__":
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    parts = sys.argv[1:] or ["tiny", "smollm2"]
    for part in parts:
        {"tiny": make_tiny, "smollm2": make_smollm2}[part]()
