"""Hugging Face architecture names and the module of each; modules are imported when asked for."""

import dataclasses
import importlib
from collections.abc import Callable

from octavo.configs.errors import ConfigError
from octavo.models_flax.decoder import Decoder
from octavo.models_flax.rules import Rule

MODULES = {
    "LlamaForCausalLM": "octavo.models_flax.llama",
    "MistralForCausalLM": "octavo.models_flax.llama",
    "Qwen3ForCausalLM": "octavo.models_flax.qwen3",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model file offers, as its `FAMILY`.

    Attributes:
      build: (config, *, dtype, materialize_tied_head) -> the model; call it under `nnx.eval_shape`.
      rules: where each of the checkpoint's tensors goes.
      ignored: shell patterns of tensors that a checkpoint may hold and we do not need.
    """

    build: Callable[..., Decoder]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


def load_family(architecture: str) -> Family:
    """The family of one architecture; refuses those that `MODULES` does not name."""
    if architecture not in MODULES:
        raise ConfigError(f"architecture {architecture} is not supported; supported: {', '.join(MODULES)}")
    family = importlib.import_module(MODULES[architecture]).FAMILY
    if not isinstance(family, Family):
        raise TypeError(f"{MODULES[architecture]}.FAMILY must be a Family")
    return family
