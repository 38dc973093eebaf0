"""Every parameter of every family has a place on the mesh, and the axes that split are the ones that should."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from octavo.configs.model import ModelConfig
from octavo.models_flax.registry import MODULES, load_family
from octavo.sharding.mesh import make_mesh
from octavo.sharding.rules import TENSOR_PARALLEL


def parameters(architecture: str) -> dict[str, nnx.Param]:
    """Path -> abstract parameter of a small model that has every part."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )
    build = load_family(architecture).build
    state = nnx.state(nnx.eval_shape(lambda: build(config, dtype=jnp.float32)), nnx.Param)
    return {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}


@pytest.mark.parametrize("architecture", MODULES)
def test_every_parameter_has_a_place(architecture: str) -> None:
    mesh = make_mesh(tensor=2)
    found = parameters(architecture)
    assert found
    for parameter in found.values():
        shape = parameter.get_value().shape
        TENSOR_PARALLEL.sharding(mesh, parameter.get_metadata()["axes"], shape)


def test_the_split_is_megatrons() -> None:
    found = parameters("LlamaForCausalLM")
    spec = {path: TENSOR_PARALLEL.spec(p.get_metadata()["axes"]) for path, p in found.items()}
    assert spec["layers.0.attention.qkv.weight"] == PartitionSpec(None, "tensor", None, None)
    assert spec["layers.0.attention.out.weight"] == PartitionSpec("tensor", None, None)
    assert spec["layers.0.mlp.gate_up.weight"] == PartitionSpec(None, None, "tensor")
    assert spec["layers.0.mlp.down.weight"] == PartitionSpec("tensor", None)
    assert spec["layers.0.attention_norm.scale"] == PartitionSpec(None)
