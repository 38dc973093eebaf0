"""The rule language and the families' tables."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.configs.errors import ConfigError
from octavo.configs.model import ARCHITECTURES, ModelConfig
from octavo.models_flax.checkpoint.loader import parameters
from octavo.models_flax.registry import MODULES, load_family
from octavo.models_flax.rules import Rule, expand, parse

SIZES = {"d": 6, "k": 2, "g": 3, "h": 4, "n": 6, "v": 5, "f": 7}


def test_patterns_give_shapes_and_turn_arrays() -> None:
    layout = parse("(k g h) d -> d k g h", SIZES)
    assert layout.shape == (24, 6)
    assert layout.result == (6, 2, 3, 4)
    x = np.arange(24 * 6).reshape(24, 6)
    np.testing.assert_array_equal(layout.apply(x), np.moveaxis(x.reshape(2, 3, 4, 6), 3, 0))
    assert parse("(k h) d -> d k 1 h", SIZES).result == (6, 2, 1, 4)
    assert parse("f -> 1 f", SIZES).result == (1, 7)
    assert parse("d (n h) -> (n h) d", SIZES).result == (24, 6)


@pytest.mark.parametrize("pattern", ["v d -> v", "v d -> d v h", "d d -> d d"])
def test_patterns_must_keep_every_letter(pattern: str) -> None:
    with pytest.raises(ValueError, match="same letters"):
        parse(pattern, SIZES)


def config(architecture: str, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": architecture, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def test_expansion_drops_rules_whose_target_is_not_there() -> None:
    rules = (Rule("a.{layer}", "x.{layer}", "d -> d"), Rule("b.{layer}", "y.{layer}", "d -> d"))
    found = expand(rules, config("LlamaForCausalLM"), {"x.0": 0, "x.1": 0})
    assert {target: [part.source for part in a.parts] for target, a in found.items()} == {
        "x.0": ["a.0"],
        "x.1": ["a.1"],
    }


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tables_cover_their_models(architecture: str, biased: bool) -> None:
    model_config = config(architecture, attention_bias=biased, attention_out_bias=biased, mlp_bias=biased)
    family = load_family(architecture)
    shapes = {
        path: shape
        for path, (shape, _) in parameters(
            nnx.eval_shape(lambda: family.build(model_config, dtype=jnp.float32))
        ).items()
    }
    found = expand(family.rules, model_config, shapes)
    assert set(found) == set(shapes)
    for target, assembly in found.items():
        parts = [np.zeros(part.layout.shape) for part in assembly.parts]
        turned = [np.asarray(part.layout.apply(x)) for part, x in zip(assembly.parts, parts, strict=True)]
        whole = turned[0] if assembly.axis is None else np.concatenate(turned, axis=assembly.axis)
        assert whole.shape == shapes[target], target


def test_registry_and_configs_know_the_same_architectures() -> None:
    assert set(MODULES) == set(ARCHITECTURES)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"):
        load_family("GPT2LMHeadModel")
