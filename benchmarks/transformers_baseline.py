"""Speed of transformers' `generate` on torch for SmolLM2: single stream, float32, greedy. Prints one JSON object.

Prompts come on stdin as JSON, a list of lists of token ids. Runs in the environment of the goldens (Python 3.11,
torch on CPU); started by smollm2_vs_transformers.py.
"""

import argparse
import json
import sys
import time

import torch
import transformers

from tests.goldens.torch_reference import load_smollm2


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-length", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, _ = load_smollm2()
    prompts = json.load(sys.stdin)
    seconds, outputs = [], []
    for prompt in [prompts[0], *prompts]:  # the first run warms up and does not count
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=arguments.output_length,
            max_new_tokens=arguments.output_length,
        )
        seconds.append(time.perf_counter() - started)
        outputs.append(out[0, len(prompt) :].tolist())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"seconds": seconds[1:], "outputs": outputs[1:], **versions}))


if __name__ == "__main__":
    main()
