"""Reading the committed reference outputs, and comparing log-probabilities with them."""

import dataclasses
import json
import pathlib

import numpy as np

from tests.references.tiny_models import TinyModel

FOLDER = pathlib.Path(__file__).parents[1] / "goldens"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What transformers said, see tests/goldens/make_goldens.py.

    Attributes:
      prompt, output: token ids; the output is greedy and nothing ends it.
      chosen: f32[P + O], the log-probability of each token, NaN for the first.
      top_ids, top_logprobs: [P + O, 5], the likeliest tokens there.
      gap: f32[O], how far the likeliest output token is ahead of the second.
    """

    prompt: list[int]
    output: list[int]
    chosen: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    gap: np.ndarray

    def num_certain(self, tolerance: float) -> int:
        """Output tokens before the first whose two likeliest candidates are closer than `tolerance`."""
        close = np.flatnonzero(self.gap < tolerance)
        return int(close[0]) if close.size else len(self.output)


def tiny_golden(model: TinyModel) -> Golden:
    """The golden of a listed tiny model."""
    with np.load(model.golden) as arrays:
        return _golden(dict(arrays))


def smollm2_goldens() -> dict[str, tuple[dict, Golden]]:
    """Per name, a prompt as in smollm2_prompts.json (with `text` or `messages`) and its golden."""
    prompts = json.loads((FOLDER / "smollm2_prompts.json").read_text(encoding="utf-8"))
    with np.load(FOLDER / "smollm2.npz") as arrays:
        fields = [field.name for field in dataclasses.fields(Golden)]
        return {
            prompt["name"]: (prompt, _golden({field: arrays[f"{prompt['name']}/{field}"] for field in fields}))
            for prompt in prompts
        }


def _golden(arrays: dict[str, np.ndarray]) -> Golden:
    ids = {name: arrays.pop(name).tolist() for name in ("prompt", "output")}
    return Golden(**ids, **arrays)
