"""The gated feed-forward block (Shazeer 2020): down(act(gate(x)) · up(x))."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from octavo.configs.model import ModelConfig
from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.layers import Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """gate and up are one array [D, 2, F], which shards over F."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike) -> None:
        width = config.intermediate_size
        self.activation = config.hidden_act
        self.gate_up = Linear(
            "td,duf->tuf",
            (config.hidden_size, 2, width),
            ("embed", None, "mlp"),
            bias_dims=2 if config.mlp_bias else 0,
            dtype=dtype,
        )
        self.down = Linear(
            "tf,fd->td",
            (width, config.hidden_size),
            ("mlp", "embed"),
            bias_dims=1 if config.mlp_bias else 0,
            dtype=dtype,
        )

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate_up = self.gate_up(x, ctx)
        return self.down(ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1], ctx)
