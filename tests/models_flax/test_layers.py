"""Projections, norms and embedding against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models_flax.inputs import ForwardContext
from octavo.models_flax.layers import Embed, Linear, RMSNorm, linear, param

CTX = ForwardContext(positions=jnp.zeros((3,), jnp.int32), plans=())


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("spec", "x", "weight"),
    [
        ("td,dkgh->tkgh", (3, 8), (8, 2, 4, 6)),
        ("tnh,nhd->td", (3, 4, 6), (4, 6, 8)),
        ("td,duf->tuf", (3, 8), (8, 2, 5)),
        ("gd,vd->gv", (3, 8), (11, 8)),
    ],
)
def test_linear_is_the_einsum_of_its_spec(spec: str, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    a, b = normal(*x), normal(*weight)
    expected = np.einsum(spec, a, b)
    np.testing.assert_allclose(linear(spec, jnp.asarray(a), jnp.asarray(b), CTX), expected, atol=1e-5)
    bias = normal(*expected.shape[1:])
    found = linear(spec, jnp.asarray(a), jnp.asarray(b), CTX, bias=jnp.asarray(bias))
    np.testing.assert_allclose(found, expected + bias, atol=1e-5)


def test_linear_gives_the_dtype_that_is_asked_for() -> None:
    x, weight = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    assert linear("gd,dv->gv", x, weight, CTX).dtype == jnp.bfloat16
    assert linear("gd,dv->gv", x, weight, CTX, dtype=jnp.float32).dtype == jnp.float32


def test_bias_spans_the_trailing_dimensions() -> None:
    layer = nnx.eval_shape(
        lambda: Linear(
            "td,dkgh->tkgh", (8, 2, 3, 4), ("embed", "kv_heads", None, "head"), bias_dims=3, dtype=jnp.float32
        )
    )
    assert layer.bias is not None
    assert layer.bias.get_value().shape == (2, 3, 4)
    assert layer.bias.get_metadata("axes") == ("kv_heads", None, "head")
    assert layer.weight.get_metadata("axes") == ("embed", "kv_heads", None, "head")


def test_param_wants_a_name_for_each_dimension() -> None:
    with pytest.raises(ValueError, match="one entry a dimension"):
        param((2, 3), ("embed",), jnp.float32)


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(8, "embed", eps=1e-5, dtype=jnp.float32)
    scale, x = normal(8), normal(*shape)
    norm.scale.set_value(jnp.asarray(scale))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_computes_in_float32() -> None:
    norm = RMSNorm(8, "embed", eps=1e-5, dtype=jnp.float16)
    norm.scale.set_value(jnp.ones((8,), jnp.float16))
    out = norm(jnp.full((1, 8), 1000.0, jnp.float16))  # its square is beyond float16
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, 1.0, rtol=1e-3)


def test_embed_reads_the_nearest_row_for_padding() -> None:
    embed = Embed(5, 3, dtype=jnp.float32)
    table = normal(5, 3)
    embed.table.set_value(jnp.asarray(table))
    found = jax.jit(lambda tokens: embed(tokens))(jnp.array([0, 4, 99], jnp.int32))
    np.testing.assert_array_equal(found, table[[0, 4, 4]])
