"""One attention block: fused projections, optional norms of queries and keys, rotation, the attention op.

The op itself is an argument (`ctx.attend`), chosen at start-up; this module knows no blocks.
"""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from octavo.configs.cache import KVSpec
from octavo.configs.model import ModelConfig
from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.layers import Linear, RMSNorm
from octavo.models_flax.rope import rotate


class Attention(nnx.Module):
    """Grouped-query attention.

    q, k and v are one array [D, K, N / K + 2, H], which shards over K: the queries of
    a key/value head, then its key, then its value. So query head n belongs to
    key/value head n // (N / K).
    """

    def __init__(self, config: ModelConfig, *, qk_norm: bool, dtype: DTypeLike) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self.queries_per_kv = heads // kv_heads
        self.scale = size**-0.5
        self.qkv = Linear(
            "td,dkgh->tkgh",
            (config.hidden_size, kv_heads, self.queries_per_kv + 2, size),
            ("embed", "kv_heads", None, "head"),
            bias_dims=3 if config.attention_bias else 0,
            dtype=dtype,
        )
        self.out = Linear(
            "tnh,nhd->td",
            (heads, size, config.hidden_size),
            ("heads", "head", "embed"),
            bias_dims=1 if config.attention_out_bias else 0,
            dtype=dtype,
        )
        self.q_norm = RMSNorm(size, "head", eps=config.rms_norm_eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(size, "head", eps=config.rms_norm_eps, dtype=dtype) if qk_norm else None

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], ctx: ForwardContext, cache: Any, group: int
    ) -> tuple[jax.Array, Any]:
        """x [T, D], this layer's cache -> ([T, D], the cache with this step's keys and values)."""
        qkv = self.qkv(x, ctx)
        q = qkv[:, :, : self.queries_per_kv].reshape(x.shape[0], -1, qkv.shape[-1])  # [T, N, H]
        k, v = qkv[:, :, -2], qkv[:, :, -1]  # [T, K, H]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out, cache = ctx.attend(q, k, v, cache, ctx.plans[group], scale=self.scale)
        return self.out(out, ctx), cache


def kv_spec(config: ModelConfig) -> KVSpec:
    """What a full-attention layer of this model keeps."""
    return KVSpec(num_kv_heads=config.num_kv_heads, key_size=config.head_dim, value_size=config.head_dim)
