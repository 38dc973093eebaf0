"""Loads a model through the real loader and runs whole sequences through it with dense attention."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from octavo.configs.model import ModelConfig
from octavo.models_flax.checkpoint import load_model, resolve
from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.program import merge_model
from tests.references.dense_attention import attend


def logits_of(model: str, materialize_tied_head: bool = True) -> Callable[[Sequence[int]], np.ndarray]:
    """A function from token ids to f32[T, V] logits, for the model at a path, in float32."""
    source = resolve(model)
    config = ModelConfig.from_hf(source.config, source.generation_config)
    definition, leaves = load_model(
        source, config, dtype=jnp.float32, materialize_tied_head=materialize_tied_head, progress=False
    )

    @jax.jit
    def forward(leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        built = merge_model(definition, leaves)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        ctx = ForwardContext(positions=positions, plans=(None,), attend=attend)
        hidden, _ = built(tokens, ctx, (None,) * config.num_layers)
        return built.logits(hidden, ctx)

    return lambda tokens: np.asarray(forward(leaves, jnp.asarray(tokens, jnp.int32)))


def logprobs(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """f32[T - 1]: the log-probability of tokens 1, 2, … after what came before."""
    table = np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))
    return table[np.arange(len(tokens) - 1), np.asarray(tokens[1:])]
