"""The naive truth about attention: all tokens are one sequence, and there is no cache."""

from typing import Any

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, plan: Any, *, scale: float) -> tuple[jax.Array, Any]:
    """q [T, N, H], k [T, K, H], v [T, K, Hv] of one whole sequence -> ([T, N, Hv], the cache as it was)."""
    del plan
    tokens, heads = q.shape[:2]
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k) * scale
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("nts,snh->tnh", weights, v).astype(q.dtype), cache
