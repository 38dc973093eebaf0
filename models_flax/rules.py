"""The rule language that maps a checkpoint's tensors to ours, and its expansion for one model.

    Rule("model.layers.{layer}.self_attn.q_proj.weight", "layers.{layer}.attention.qkv.weight",
         "(k g h) d -> d k g h", axis=2)

reads: reshape and transpose as the pattern says (einops notation; letters are the axis
alphabet in lower case, g is N / K), then lay it beside the other rules' tensors of the same
target along `axis`, in the order of the table. Refuses nothing itself; `loader` does.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from octavo.configs.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a checkpoint and its place in our model.

    Attributes:
      source: Hugging Face name; `{layer}` stands for every layer.
      target: path of our parameter.
      pattern: "checkpoint axes -> our axes".
      axis: of a fused parameter, the dimension along which its parts lie; None for a whole one.
    """

    source: str
    target: str
    pattern: str
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pattern with its sizes: how one tensor is turned.

    Attributes:
      shape: what the checkpoint must have.
      split: the shape with every letter an axis of its own.
      order: the permutation of those axes.
      result: our shape.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    result: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        """Turns a jax or numpy array of `shape` into one of `result`."""
        return jnp.transpose(jnp.reshape(x, self.split), self.order).reshape(self.result)


@dataclasses.dataclass(frozen=True)
class Part:
    """One source of a parameter."""

    source: str
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A parameter: its parts, side by side along `axis` if there are several."""

    parts: tuple[Part, ...]
    axis: int | None


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The axis alphabet of one model, in lower case as patterns use it."""
    return {
        "v": config.vocab_size,
        "d": config.hidden_size,
        "f": config.intermediate_size,
        "n": config.num_heads,
        "k": config.num_kv_heads,
        "g": config.num_heads // config.num_kv_heads,
        "h": config.head_dim,
    }


def parse(pattern: str, sizes: Mapping[str, int]) -> Layout:
    """Resolves one pattern; `1` makes an axis of size one."""
    left, _, right = pattern.partition("->")
    groups, targets = _groups(left), _groups(right)
    letters = [letter for group in groups for letter in group]
    wanted = [letter for group in targets for letter in group if letter != "1"]
    if sorted(letters) != sorted(wanted) or len(set(letters)) != len(letters):
        raise ValueError(f"pattern {pattern!r} must have the same letters, once each, on both sides")
    return Layout(
        shape=tuple(math.prod(sizes[x] for x in group) for group in groups),
        split=tuple(sizes[x] for x in letters),
        order=tuple(letters.index(x) for x in wanted),
        result=tuple(math.prod(sizes[x] for x in group if x != "1") for group in targets),
    )


def expand(rules: Sequence[Rule], config: ModelConfig, targets: Mapping[str, object]) -> dict[str, Assembly]:
    """Writes the table out for every layer, without the rules whose target this model does not have."""
    sizes = axis_sizes(config)
    found: dict[str, tuple[list[Part], int | None]] = {}
    for rule in rules:
        layout = parse(rule.pattern, sizes)
        for layer in range(config.num_layers if "{layer}" in rule.source else 1):
            target = rule.target.replace("{layer}", str(layer))
            if target in targets:
                parts, _ = found.setdefault(target, ([], rule.axis))
                parts.append(Part(rule.source.replace("{layer}", str(layer)), layout))
    return {target: Assembly(tuple(parts), axis) for target, (parts, axis) in found.items()}


def _groups(side: str) -> list[list[str]]:
    return [(token[1:-1].split() if token.startswith("(") else [token]) for token in re.findall(r"\([^)]*\)|\S+", side)]
