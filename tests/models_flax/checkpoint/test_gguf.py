"""GGUF: values of every type, the same model as in safetensors, and what metadata may ask for."""

import pathlib
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest

from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import ModelConfig, RopeConfig
from octavo.models_flax.checkpoint import resolve
from octavo.models_flax.checkpoint.gguf_file import GGUFFile
from octavo.models_flax.checkpoint.gguf_reader import GGUFReader
from octavo.models_flax.rope import make_rope
from tests.references.dense_model import logits_of
from tests.references.gguf_files import write_gguf
from tests.references.tiny_models import BY_NAME, TinyModel, make_weights, write_checkpoint

F32_DTYPE = np.dtype(np.float32)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_values_of_every_type(version: int, alignment: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    random = np.random.default_rng(0)
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    arrays = {f"{kind}.weight": (random.normal(size=(5, 64)).astype(np.float32), kind) for kind in kinds}
    metadata = {"general.architecture": "qwen3", "yes": True, "no": False, "text": "é", "list": [3, 4], "real": 0.5}
    write_gguf(path, metadata, arrays, version, alignment)
    reader = GGUFReader(GGUFFile(path))
    for name, (values, kind) in arrays.items():
        quantization = gguf.GGMLQuantizationType[kind]
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, quantization), quantization)
        found = reader.read(name, F32_DTYPE)
        assert found.shape == (5, 64)
        np.testing.assert_array_equal(found.astype(np.float32), expected.reshape(5, 64))
        np.testing.assert_allclose(found.astype(np.float32), values, atol=0.3)
    parsed = {k: v for k, v in GGUFFile(path).metadata.items() if k != "general.alignment"}
    assert parsed == metadata


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_model(
    path: pathlib.Path,
    model: TinyModel,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """The tiny model as llama.cpp's converter writes it."""
    config, arch = model.config, "llama" if model.config["model_type"] != "qwen3" else "qwen3"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": model.num_kv_heads}
    tensors = {name: (values, "F32") for name, values in (extra_tensors or {}).items()}
    for name, weight in make_weights(model.name).items():
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            renamed = f"blk.{layer}.{NAMES[part]}.{suffix}"
            if arch == "llama" and (n := heads.get(part.split(".")[-1])):  # halves -> interleaved
                split = weight.reshape(n, 2, weight.shape[0] // n // 2, -1)
                weight = split.swapaxes(1, 2).reshape(weight.shape)
        else:
            renamed = f"{NAMES[stem]}.{suffix}"
        tensors[renamed] = (weight, "F32")
    if factors := (extra or {}).pop("rope_freqs.weight", None):
        tensors["rope_freqs.weight"] = (np.asarray(factors, np.float32), "F32")
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": model.num_kv_heads,
        f"{arch}.attention.key_length": model.head_dim,
        f"{arch}.attention.value_length": model.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(config.get("rope_theta", 1e4)),
        f"{arch}.rope.dimension_count": model.head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        **(extra or {}),
    }
    write_gguf(path, metadata, tensors)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied", "llama-biases", "qwen3", "qwen3-tied", "llama-llama3-old"])
def test_the_same_model_as_in_safetensors(name: str, tmp_path: pathlib.Path) -> None:
    model = BY_NAME[name]
    extra: dict[str, Any] = {}
    if name == "llama-llama3-old":  # the converter stores the factors instead of the parameters
        scaled = _inv_freq(ModelConfig.from_hf(model.config).rope, model.head_dim)
        plain = _inv_freq(RopeConfig(theta=model.config["rope_theta"]), model.head_dim)
        extra["rope_freqs.weight"] = (plain / scaled).tolist()
    write_model(tmp_path / "model.gguf", model, extra)
    write_checkpoint(model, tmp_path / "hf")
    from_hf = resolve(str(tmp_path / "hf"))
    from_gguf = resolve(str(tmp_path))
    assert from_gguf.tokenizer_dir is None and from_gguf.gguf_metadata is not None
    expected = ModelConfig.from_hf(from_hf.config)
    found = ModelConfig.from_hf(from_gguf.config, from_gguf.generation_config)
    assert found.eos_token_ids == (2, 5)
    for field in ("vocab_size", "head_dim", "num_kv_heads", "tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert getattr(found, field) == getattr(expected, field), field
    tokens = list(range(20, 60))
    np.testing.assert_allclose(
        logits_of(str(tmp_path / "model.gguf"))(tokens), logits_of(str(tmp_path / "hf"))(tokens), atol=1e-4
    )


def _inv_freq(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return np.asarray(make_rope(rope, head_dim).inv_freq)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none"}, RopeConfig()),
        ({"type": "linear", "factor": 4.0}, RopeConfig(kind="linear", factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0),
        ),
        (
            {"type": "yarn", "factor": 1.0, "original_context_length": 128, "yarn_attn_factor": 1.5},
            RopeConfig(kind="yarn", factor=1.0, original_max_position=128, attention_factor=1.5),
        ),
    ],
    ids=["none", "linear", "yarn", "yarn-attention-factor"],
)
def test_rope_keys(keys: dict[str, Any], expected: RopeConfig, tmp_path: pathlib.Path) -> None:
    extra = {f"llama.rope.scaling.{name}": entry for name, entry in keys.items()}
    write_model(tmp_path / "model.gguf", BY_NAME["llama-gqa"], extra)
    assert ModelConfig.from_hf(resolve(str(tmp_path / "model.gguf")).config).rope == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture 'gemma3' is not supported; supported: llama, q"),
        ({"general.architecture": 3}, "general.architecture 3"),
        ({"general.architecture": ["llama"]}, r"general.architecture \['llama'\]"),
        ({"llama.expert_count": 8}, "llama.expert_count 8: experts are not supported yet"),
        ({"llama.expert_used_count": 2}, "llama.expert_used_count 2: experts are not supported yet"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64 is not supported yet"),
        ({"llama.attention.sliding_window": [64, 512]}, r"sliding_window \[64, 512\] is not supported yet"),
        ({"llama.attention.causal": False}, "llama.attention.causal False is not supported"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale 0.5 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5 is not supported"),
        ({"split.count": 3}, "split.count 3: one file of several; join them"),
        ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv differs between layers"),
        ({"llama.attention.value_length": 8}, "value_length differs"),
        ({"llama.rope.dimension_count": 8}, "dimension_count 8 differs from the head size"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "x"}, "factor must be a number"),
        ({"llama.embedding_length": "64"}, "hidden_size must be an integer"),
        ({"rope_freqs.weight": [1.0, 2.0]}, "freq_factors must have head_dim / 2 = 8 entries, got 2"),
        ({"rope_freqs.weight": [0.0] * 8}, "freq_factors must be finite positive"),
    ],
    ids=str,
)
def test_metadata_that_we_cannot_use(extra: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    write_model(tmp_path / "model.gguf", BY_NAME["llama-gqa"], extra)
    with pytest.raises((LoadError, ConfigError), match=message):
        ModelConfig.from_hf(resolve(str(tmp_path / "model.gguf")).config)


def test_what_changes_nothing_is_accepted(tmp_path: pathlib.Path) -> None:
    """Zeros stand for "not so", a window as long as the context is none, and one part is the whole."""
    extra = {
        "llama.expert_count": 0,
        "llama.attention.scale": 0.0,
        "llama.attention.sliding_window": 512,
        "split.count": 1,
    }
    write_model(tmp_path / "model.gguf", BY_NAME["llama-gqa"], extra)
    ModelConfig.from_hf(resolve(str(tmp_path / "model.gguf")).config)


def test_all_tokens_that_end_an_answer(tmp_path: pathlib.Path) -> None:
    """B123: files name one or two of them; control tokens known for it end an answer as well, text does not."""
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 3, 3]}
    write_model(tmp_path / "model.gguf", BY_NAME["llama-gqa"], extra)
    config = ModelConfig.from_hf(resolve(str(tmp_path / "model.gguf")).config)
    assert set(config.eos_token_ids) == {2, 5, 3}, "eos, eot, and <|eot_id|>; 5 is <|endoftext|>, too"


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale", "rope_factors_long.weight", "x"])
def test_tensors_without_a_place_are_named(name: str, tmp_path: pathlib.Path) -> None:
    write_model(tmp_path / "model.gguf", BY_NAME["llama-gqa"], extra_tensors={name: np.ones((2, 32), np.float32)})
    with pytest.raises(LoadError, match=f"no place for: {name}"):
        logits_of(str(tmp_path / "model.gguf"))
