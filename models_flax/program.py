"""Models as values: a hashable definition and a flat tuple of weights, as compiled steps take them."""

import dataclasses
from typing import Any

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """Everything about a model but its weights; equal for models of equal structure."""

    graphdef: Any
    treedef: Any


def split_model(model: nnx.Module) -> tuple[ModelDef, tuple[Any, ...]]:
    """The definition, and the weights in the order of their paths. Works inside a trace as well."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return ModelDef(graphdef, treedef), tuple(leaves)


def merge_model(definition: ModelDef, leaves: tuple[Any, ...]) -> Any:
    """The inverse of `split_model`; meant for the inside of a trace."""
    return nnx.merge(definition.graphdef, jax.tree.unflatten(definition.treedef, leaves))
