"""The parts every model is made of: parameters with named axes, projections, RMSNorm, embedding.

All projections go through `linear`: quantised weights, adapters and sharding constraints
hook in there and nowhere else.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octavo.models_flax.inputs import ForwardContext

type Axes = tuple[str | None, ...]


def param(shape: tuple[int, ...], axes: Axes, dtype: DTypeLike) -> nnx.Param:
    """A parameter to be filled by a loader, with one logical axis name per dimension (sharding rules read them)."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} must have one entry a dimension")
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def linear(
    spec: str, x: jax.Array, weight: Any, ctx: ForwardContext, *, bias: jax.Array | None = None, dtype: Any = None
) -> jax.Array:
    """The one seam of all projections.

    Args:
      spec: the einsum of x and the weight, e.g. "td,dkgh->tkgh".
      x: activations.
      weight: a pytree; today a dense array.
      ctx: what adapters will need (static and per-token context of the step).
      bias: added to every token's result; one dimension less than that.
      dtype: of the result; that of x by default.
    """
    # float32 means float32: GPUs would otherwise round operands to tf32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out_type = dtype or x.dtype
    left, right = spec.split("->")[0].split(",")
    shared = "".join(axis for axis in left if axis in right)
    if left.endswith(shared) and right.startswith(shared):
        # As one flat product: with several contracted axes XLA on CPU would transpose the weight at every step.
        lead, tail = x.shape[: len(left) - len(shared)], weight.shape[len(shared) :]
        rows = x.reshape(*lead, -1)
        flat = jnp.matmul(
            rows, weight.reshape(rows.shape[-1], -1), precision=precision, preferred_element_type=out_type
        )
        out = flat.reshape(*lead, *tail)
    else:
        out = jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=out_type)
    return out if bias is None else out + bias[None]


class Linear(nnx.Module):
    """A projection; the einsum string is its specification.

    Args:
      spec: see `linear`.
      shape, axes: of the weight.
      bias_dims: how many trailing dimensions of the weight the bias spans, 0 for no bias.
      dtype: of the weight.
    """

    def __init__(self, spec: str, shape: tuple[int, ...], axes: Axes, *, bias_dims: int = 0, dtype: DTypeLike) -> None:
        self.spec = spec
        self.weight = param(shape, axes, dtype)
        self.bias = param(shape[-bias_dims:], axes[-bias_dims:], dtype) if bias_dims else None

    def __call__(self, x: jax.Array, ctx: ForwardContext, dtype: Any = None) -> jax.Array:
        bias = None if self.bias is None else self.bias.get_value()
        return linear(self.spec, x, self.weight.get_value(), ctx, bias=bias, dtype=dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · scale over the last axis, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, axis: str | None, *, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = param((size,), (axis,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale.get_value().astype(jnp.float32)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Embed(nnx.Module):
    """Token ids to vectors: table [V, D]."""

    def __init__(self, vocab_size: int, size: int, *, dtype: DTypeLike) -> None:
        self.table = param((vocab_size, size), ("vocab", "embed"), dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32[T] -> [T, D]; ids outside the vocabulary (padding) read its nearest row."""
        return self.table.get_value().at[tokens].get(mode="clip")
