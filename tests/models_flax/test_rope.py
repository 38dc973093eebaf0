"""Frequencies of every rope kind against those of transformers 5.24 (LlamaRotaryEmbedding), and the rotation."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.errors import ConfigError
from octavo.configs.model import ModelConfig, RopeConfig
from octavo.models_flax.rope import make_rope, rotate

# name: (head_dim, max_position_embeddings, theta, rope_scaling, inverse frequencies, attention factor)
CASES: dict[str, tuple[int, int, float, dict[str, Any] | None, list[float], float]] = {
    "default": (
        16, 512, 1e4, None,
        [1.0, 0.31622776, 0.1, 0.031622779, 0.0099999998, 0.0031622779, 0.001, 0.00031622779], 1.0,
    ),
    "linear": (
        16, 512, 5e4, {"type": "linear", "factor": 4.0},
        [0.25, 0.064650036, 0.016718509, 0.0043234085, 0.001118034, 0.00028912374, 7.4767442e-05, 1.933487e-05], 1.0,
    ),
    "llama3": (
        32, 131072, 5e5,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        [
            1.0, 0.44036663, 0.19392276, 0.085397102, 0.037606031, 0.016560441, 0.0072926651, 0.0032114461,
            0.00052484602, 7.7846555e-05, 3.4281024e-05, 1.5096218e-05, 6.6478697e-06, 2.9274997e-06, 1.2891732e-06,
            5.6770881e-07,
        ],
        1.0,
    ),
    "yarn": (
        32, 32768, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        [
            1.0, 0.42169651, 0.17782794, 0.074989416, 0.031622779, 0.011334933, 0.0039363895, 0.0013042556,
            0.00040000002, 0.00010542412, 4.4456985e-05, 1.8747356e-05, 7.9056936e-06, 3.3338035e-06, 1.4058534e-06,
            5.9284343e-07,
        ],
        1.138629436111989,
    ),
    "yarn-mscale": (
        32, 4096, 1e4,
        {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.5,
            "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2,
        },
        [
            1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.056234129, 0.031622779, 0.01431515, 0.0060999999,
            0.0023337165, 0.00069570105, 4.4456985e-05, 2.4999999e-05, 1.4058533e-05, 7.9056945e-06, 4.4456983e-06,
        ],
        1.3114439803925217,
    ),
    "yarn-attention-factor": (
        16, 4096, 1e4, {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "truncate": False},
        [1.0, 0.31622776, 0.1, 0.028112082, 0.0059831329, 0.00097285764, 0.00012500001, 3.9528473e-05], 1.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name: str) -> None:
    head_dim, max_position, theta, scaling, expected, factor = CASES[name]
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": head_dim, "rope_theta": theta,
            "max_position_embeddings": max_position, "rope_scaling": scaling,
        }
    )  # fmt: skip
    rope = make_rope(config.rope, head_dim)
    # transformers computes in float32
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=3e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_frequency_factors_divide() -> None:
    plain = make_rope(RopeConfig(), 8)
    factored = make_rope(RopeConfig(freq_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_allclose(factored.inv_freq, np.asarray(plain.inv_freq) / [1, 2, 4, 8])


def test_rotation_turns_pairs_by_position() -> None:
    rope = make_rope(RopeConfig(kind="yarn", factor=4.0, original_max_position=64), 8)
    positions = np.array([0, 1, 7, 500], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 2, 8)).astype(np.float32)
    found = rotate(jnp.asarray(x), *rope.tables(jnp.asarray(positions)))
    # The pair (i, i + H/2) as a complex number, multiplied by e^(i · position · frequency).
    turn = np.exp(1j * positions[:, None, None] * np.asarray(rope.inv_freq)) * rope.attention_factor
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-5)


def test_rotation_keeps_the_dtype() -> None:
    rope = make_rope(RopeConfig(), 8)
    x = jnp.ones((3, 1, 8), jnp.bfloat16)
    assert rotate(x, *rope.tables(jnp.arange(3, dtype=jnp.int32))).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dynamic"},
        {"kind": "yarn"},
        {"kind": "llama3", "original_max_position": 0},
        {"kind": "llama3", "original_max_position": 64, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"theta": 1.0},
        {"freq_factors": (1.0, 0.0)},
        {"freq_factors": (1.0, float("nan"))},
    ],
    ids=str,
)
def test_impossible_ropes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rope"):
        RopeConfig(**fields)
