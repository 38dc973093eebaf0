"""Hugging Face spellings, and what is refused."""

import json
import pathlib
from typing import Any

import pytest

from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import ARCHITECTURES, ModelConfig, RopeConfig

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def llama(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **SIZES, **changes}


def qwen3(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **SIZES, "num_key_value_heads": 2, **changes}


def mistral(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], **SIZES, "num_key_value_heads": 2, **changes}


def test_llama_defaults_are_those_of_transformers() -> None:
    config = ModelConfig.from_hf(llama())
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert not config.tie_word_embeddings and not config.attention_bias and not config.mlp_bias


def test_real_configs() -> None:
    folder = pathlib.Path(__file__).parents[2] / "benchmarks" / "models"
    files = sorted(folder.glob("*/config.json"))
    if not files:
        pytest.skip("no configs in benchmarks/models")
    found = {file.parent.name: ModelConfig.from_hf(json.loads(file.read_text())) for file in files}
    assert found["llama-3.1-8b"].rope.kind == "llama3"
    assert found["llama-3.1-8b"].head_dim == 128
    assert found["qwen3-0.6b"].tie_word_embeddings


@pytest.mark.parametrize("value", [{"head_dim": 24}, {"head_dim": None}, {}], ids=["given", "null", "absent"])
def test_head_dim(value: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(llama(**value)).head_dim == (value.get("head_dim") or 16)


def test_qwen3_and_mistral_defaults() -> None:
    assert ModelConfig.from_hf(qwen3()).head_dim == 128
    assert ModelConfig.from_hf(mistral(sliding_window=None)).head_dim == 16
    assert ModelConfig.from_hf(mistral(sliding_window=None, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"type": "linear", "factor": 4.0}},
    ],
    ids=["type", "rope_type", "rope_parameters", "theta-inside-wins", "null-scaling"],
)
def test_rope_spellings(spelling: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(llama(**spelling)).rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)


def test_rope_original_length() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert ModelConfig.from_hf(llama(rope_scaling=scaling)).rope.original_max_position == 512
    inside = {**scaling, "original_max_position_embeddings": 64}
    assert ModelConfig.from_hf(llama(rope_scaling=inside)).rope.original_max_position == 64
    above = llama(rope_scaling=scaling, original_max_position_embeddings=128)
    assert ModelConfig.from_hf(above).rope.original_max_position == 128
    no_factor = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert ModelConfig.from_hf(llama(rope_scaling=no_factor)).rope.factor == 4.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_ropes_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported; supported: default, linear, llama3, yarn"):
        ModelConfig.from_hf(llama(rope_scaling={"type": kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 9}, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": [11, 7, 13]}, (7, 11, 13)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({"eos_token_id": [7, 320, -1]}, {}, (7,)),
    ],
    ids=["int", "both", "union", "null", "outside"],
)
def test_eos_is_a_union(config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(llama(**config), generation).eos_token_ids == expected


def test_biases() -> None:
    config = ModelConfig.from_hf(llama(attention_bias=True, mlp_bias=True))
    assert config.attention_bias and config.attention_out_bias and config.mlp_bias
    config = ModelConfig.from_hf(qwen3(attention_bias=True, mlp_bias=True))
    assert config.attention_bias and config.attention_out_bias and not config.mlp_bias
    config = ModelConfig.from_hf(mistral(sliding_window=None, attention_bias=True, mlp_bias=True))
    assert not (config.attention_bias or config.attention_out_bias or config.mlp_bias)


def test_sliding_windows() -> None:
    assert ModelConfig.from_hf(mistral(sliding_window=512)).num_layers == 2
    with pytest.raises(ConfigError, match="sliding_window 256, smaller than max_position_embeddings"):
        ModelConfig.from_hf(mistral(sliding_window=256))
    with pytest.raises(ConfigError, match="sliding_window 4096"):  # transformers' default for an absent key
        ModelConfig.from_hf(mistral(max_position_embeddings=32768))
    assert ModelConfig.from_hf(qwen3(use_sliding_window=False, sliding_window=64)).num_layers == 2
    with pytest.raises(ConfigError, match="use_sliding_window is not supported yet"):
        ModelConfig.from_hf(qwen3(use_sliding_window=True, sliding_window=64))


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", [3]])
def test_unknown_architectures_list_the_known(names: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(llama(architectures=names))
    assert all(name in str(error.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    "nested",
    [
        {"auto_map": {"AutoConfig": "evil.Config"}},
        {"vision_config": {"auto_map": {"AutoConfig": "evil.Config"}}},
        {"parts": [{"deep": {"auto_map": {"AutoModel": "evil.Model"}}}]},
    ],
    ids=["top", "nested", "in-a-list"],
)
def test_auto_map_is_refused_anywhere(nested: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="never runs code from a checkpoint"):
        ModelConfig.from_hf(llama(**nested))
    with pytest.raises(LoadError, match=r"generation_config\.json"):
        ModelConfig.from_hf(llama(), nested)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported yet"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": "320"}, "vocab_size must be an integer, got '320'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"num_hidden_layers": 2**32}, "num_layers must be at most 4096"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_size": 66}, "must be a multiple of num_attention_heads"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number"),
        ({"rope_theta": 0.0}, "rope_theta must be a finite number above 1"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, got inf"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number, got 1000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": float("nan")}}, "beta_fast must be a finite"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive, got 0"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must fit into 64 bits"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 0}, "max_position_embeddings must be positive"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_emb.* got 0",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate must be true or false"),
        ({"hidden_act": []}, r"hidden_act \[\] is not supported"),
        ({"hidden_act": {}}, r"hidden_act \{\} is not supported"),
        ({"rope_parameters": {"freq_factors": 5}}, "freq_factors must be a list of numbers, got 5"),
        ({"rope_parameters": {"freq_factors": "x"}}, "freq_factors must be a list of numbers, got 'x'"),
        ({"rope_parameters": {"freq_factors": [[1]]}}, r"freq_factors must be a number, got \[1\]"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a finite positive number"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one flat table"),
        ({"rope_scaling": "linear"}, "one flat table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported yet"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer"),
        ({"eos_token_id": [True]}, "eos_token_id must be an integer"),
    ],
    ids=str,
)
def test_refusals_name_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(llama(**change))


def test_activations() -> None:
    assert ModelConfig.from_hf(llama(hidden_act="gelu_pytorch_tanh")).hidden_act == "gelu_tanh"
    assert ModelConfig.from_hf(llama(hidden_act="swish")).hidden_act == "silu"
