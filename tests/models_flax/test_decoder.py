"""The decoder as a compiled program: one trace for all layers, caches in place, tied heads, overridden rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.configs.model import ModelConfig
from octavo.models_flax.decoder import Decoder
from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.program import ModelDef, merge_model, split_model
from tests.references import dense_attention

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
TOKENS = jnp.array([3, 1, 4, 1, 5], jnp.int32)


def build(dtype: Any = jnp.float32, **options: Any) -> tuple[ModelDef, tuple[jax.Array, ...]]:
    """A model of random weights whose materialised head, if there is one, is the transposed embedding."""
    definition, abstract = split_model(nnx.eval_shape(lambda: Decoder(CONFIG, dtype=dtype, **options)))
    random = np.random.default_rng(0)
    leaves = [jnp.asarray(random.normal(size=x.shape) * 0.3, dtype) for x in abstract]
    if options.get("materialize_tied_head"):
        table = merge_model(definition, tuple(leaves)).embed.table.get_value()
        leaves = [table.T if x.shape == (CONFIG.hidden_size, CONFIG.vocab_size) else x for x in leaves]
    return definition, tuple(leaves)


def forward(definition: ModelDef, leaves: tuple[jax.Array, ...], **call: Any) -> tuple[jax.Array, jax.Array]:
    """(hidden, logits) of TOKENS."""
    model = merge_model(definition, leaves)
    positions = jnp.arange(TOKENS.shape[0], dtype=jnp.int32)
    ctx = ForwardContext(positions=positions, plans=(None,), attend=dense_attention.attend)
    hidden, _ = model(TOKENS, ctx, (None,) * CONFIG.num_layers, **call)
    return hidden, model.logits(hidden, ctx)


def test_layers_share_one_trace_and_caches_are_updated_in_place() -> None:
    definition, leaves = build(qk_norm=True)
    traced = []

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, plan: Any, *, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        traced.append(scale)
        out, _ = dense_attention.attend(q, k, v, None, plan, scale=scale)
        return out, cache.at[: q.shape[0]].set(k)

    def step(leaves: tuple[jax.Array, ...], caches: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        positions = jnp.arange(TOKENS.shape[0], dtype=jnp.int32)
        ctx = ForwardContext(positions=positions, plans=(jnp.zeros((2,)),), attend=attend)
        return merge_model(definition, leaves)(TOKENS, ctx, caches)

    caches = tuple(jnp.zeros((512, 2, 8)) for _ in range(CONFIG.num_layers))
    size = sum(cache.nbytes for cache in caches)
    compiled = jax.jit(step, donate_argnums=1).lower(leaves, caches).compile()
    assert traced == [CONFIG.head_dim**-0.5]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / CONFIG.num_layers
    _, caches = compiled(leaves, caches)
    assert all(bool(jnp.any(cache[:5] != 0)) and not bool(jnp.any(cache[5:] != 0)) for cache in caches)


@pytest.mark.parametrize("materialize", [False, True], ids=["embedding", "materialised"])
def test_the_head_of_a_tied_model_is_the_embedding(materialize: bool) -> None:
    definition, leaves = build(materialize_tied_head=materialize)
    hidden, logits = forward(definition, leaves)
    model = merge_model(definition, leaves)
    assert (model.head is not None) == materialize
    np.testing.assert_allclose(logits, hidden @ model.embed.table.get_value().T, rtol=1e-5, atol=1e-5)


def test_overridden_rows_replace_embeddings() -> None:
    definition, leaves = build()
    table = merge_model(definition, leaves).embed.table.get_value()
    expected = forward(definition, leaves)[1]
    rows = jnp.zeros((5, CONFIG.hidden_size)).at[2].set(table[4])
    mask = jnp.array([False, False, True, False, False])
    model = merge_model(definition, leaves)
    ctx = ForwardContext(jnp.arange(5, dtype=jnp.int32), (None,), attend=dense_attention.attend)
    hidden, _ = model(TOKENS.at[2].set(7), ctx, (None,) * CONFIG.num_layers, override=(rows, mask))
    np.testing.assert_allclose(model.logits(hidden, ctx), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_floats_stay_short_and_logits_are_float32(dtype: Any) -> None:
    hidden, logits = forward(*build(dtype))
    assert hidden.dtype == dtype
    assert logits.dtype == jnp.float32
    full = forward(*build(jnp.float32))[1]
    assert float(jnp.abs(logits - full).max()) < 0.1 * float(jnp.abs(full).max())


def test_kv_groups() -> None:
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.float32))
    assert len(model.kv_specs) == CONFIG.num_layers
    assert (model.kv_specs[0].num_kv_heads, model.kv_specs[0].key_size) == (2, 8)
    assert model.kv_group_of_layer == (0,) * CONFIG.num_layers


def test_definitions_of_equal_models_are_equal() -> None:
    assert build()[0] == build()[0]
    assert hash(build()[0]) == hash(build()[0])
    assert build()[0] != build(qk_norm=True)[0]
