"""The one decoder that all families share; what differs between them is a constructor argument."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octavo.configs.cache import KVSpec
from octavo.configs.model import ModelConfig
from octavo.models_flax.attention import Attention, kv_spec
from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.layers import Embed, Linear, RMSNorm, linear
from octavo.models_flax.mlp import MLP
from octavo.models_flax.program import ModelDef, merge_model, split_model
from octavo.models_flax.rope import make_rope


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, *, qk_norm: bool, dtype: DTypeLike) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, "embed", eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, qk_norm=qk_norm, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, "embed", eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], ctx: ForwardContext, cache: Any, group: int
    ) -> tuple[jax.Array, Any]:
        """x [T, D], this layer's cache -> (x [T, D], cache)."""
        out, cache = self.attention(self.attention_norm(x), rope, ctx, cache, group)
        x = x + out
        return x + self.mlp(self.mlp_norm(x), ctx), cache


class Decoder(nnx.Module):
    """Embedding, L layers, a final norm and the head.

    Args:
      config: sizes and options.
      dtype: of weights and activations.
      qk_norm: an RMSNorm over each head of queries and keys.
      materialize_tied_head: with tied embeddings, keep a transposed copy [D, V] for the
        head: on CPU a product with it is five times as fast at one token.

    Attributes:
      kv_specs: per layer, what its cache holds.
      kv_group_of_layer: per layer, the index of its KV group; layers with equal specs share one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        qk_norm: bool = False,
        materialize_tied_head: bool = False,
    ) -> None:
        self.kv_specs: tuple[KVSpec, ...] = (kv_spec(config),) * config.num_layers
        groups = list(dict.fromkeys(self.kv_specs))
        self.kv_group_of_layer = tuple(groups.index(spec) for spec in self.kv_specs)
        self.rope = make_rope(config.rope, config.head_dim)
        self.embed = Embed(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([Layer(config, qk_norm=qk_norm, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, "embed", eps=config.rms_norm_eps, dtype=dtype)
        own_head = materialize_tied_head or not config.tie_word_embeddings
        shape = (config.hidden_size, config.vocab_size)
        self.head = Linear("gd,dv->gv", shape, ("embed", "vocab"), dtype=dtype) if own_head else None

    def __call__(
        self,
        tokens: jax.Array,
        ctx: ForwardContext,
        caches: tuple[Any, ...],
        override: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """One step over a flat token axis.

        Args:
          tokens: i32[T].
          ctx: positions and attention plans of the step.
          caches: one per layer; donated ones are updated in place.
          override: (rows [T, D], mask bool[T]): where the mask is set, the row replaces
            the token's embedding (images).

        Returns:
          (hidden states [T, D] after the final norm, the new caches).
        """
        x = self.embed(tokens)
        if override is not None:
            rows, mask = override
            x = jnp.where(mask[:, None], rows.astype(x.dtype), x)
        rope = self.rope.tables(ctx.positions)
        updated = []
        for layer, cache, group in zip(self.layers, caches, self.kv_group_of_layer, strict=True):
            definition, leaves = split_model(layer)
            x, cache = _run_layer(definition, group, leaves, x, rope, ctx, cache)
            updated.append(cache)
        return self.norm(x), tuple(updated)

    def logits(self, hidden: jax.Array, ctx: ForwardContext) -> jax.Array:
        """[G, D] -> f32[G, V]."""
        if self.head is not None:
            return self.head(hidden, ctx, dtype=jnp.float32)
        return linear("gd,vd->gv", hidden, self.embed.table.get_value(), ctx, dtype=jnp.float32)


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    definition: ModelDef,
    group: int,
    leaves: tuple[Any, ...],
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    ctx: ForwardContext,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """Layers of equal structure share one trace and one lowering: start-up time is that of one layer."""
    return merge_model(definition, leaves)(x, rope, ctx, cache, group)
