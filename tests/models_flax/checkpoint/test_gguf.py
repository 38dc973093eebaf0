"""GGUF: hostile headers, types, and the same model as in safetensors."""

import pathlib
import struct
import time
import tracemalloc
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
from tests.references.gguf_files import header, string, tensor, value, write_gguf
from tests.references.tiny_models import BY_NAME, TinyModel, make_weights, write_checkpoint

F32_DTYPE = np.dtype(np.float32)
U32, STRING, ARRAY, F32, Q4_K, Q8_0 = 4, 8, 9, 0, 12, 8


def key(name: str, kind: int, raw: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + raw


def array(item: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + raw


ALIGNMENT = string("general.alignment")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot read"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "short": (b"GGUF\3\0", "ends inside its header"),
    "version-1": (header(0, 0, version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
    "n_kv-2**63": (header(0, 2**63) + bytes(64), "claims 9223372036854775808 metadata keys"),
    "n_tensors-2**64-1": (header(2**64 - 1, 0) + bytes(64), "claims 18446744073709551615 tensors"),
    "n_dims-2**32-1": (header(1, 0) + string("t") + struct.pack("<I", 2**32 - 1) + bytes(64), "4294967295 dimensions"),
    "key-length-2**60": (header(0, 1) + struct.pack("<Q", 2**60) + bytes(64), "claims 1152921504606846976 bytes"),
    "empty-key": (header(0, 1) + key("", U32, bytes(4)), "has 0 bytes"),
    "key-not-utf8": (header(0, 1) + string(b"\xff\xff") + struct.pack("<II", U32, 1), "not UTF-8"),
    "string-length-2**60": (header(0, 1) + key("k", STRING, struct.pack("<Q", 2**60)), "bytes of k"),
    "array-length-2**62": (header(0, 1) + key("k", ARRAY, array(U32, 2**62)), "claims 4611686018427387904 entries"),
    "array-of-strings": (header(0, 1) + key("k", ARRAY, array(STRING, 2**61)), "entries of k"),
    "array-too-deep": (header(0, 1) + key("k", ARRAY, array(ARRAY, 1) * 9 + bytes(32)), "nested more than 4 deep"),
    "unknown-value-type": (header(0, 1) + key("k", 99, bytes(16)), "unknown value type 99"),
    "same-key-twice": (header(0, 2) + key("k", U32, bytes(4)) * 2, "'k' appears twice"),
    "same-tensor-twice": (header(2, 0) + tensor("t", [1], F32, 0) * 2 + bytes(64), "'t' appears twice"),
    "alignment-0": (header(0, 1) + ALIGNMENT + value(0), "power of two up to 1048576, got 0"),
    "alignment-3": (header(0, 1) + ALIGNMENT + value(3), "power of two"),
    "alignment-2**31": (header(0, 1) + ALIGNMENT + value(2**31), "power of two"),
    "alignment-text": (header(0, 1) + ALIGNMENT + value("32"), "power of two"),
    "dims-overflow": (header(1, 0) + tensor("t", [2**32, 2**32], F32, 0) + bytes(99), "tensor t of shape"),
    "offset-past-end": (header(1, 0) + tensor("t", [1], F32, 2**40) + bytes(64), "needs bytes 1099511627776"),
    "offset-2**64": (header(1, 0) + tensor("t", [1], F32, 2**64 - 32) + bytes(64), "needs bytes"),
    "offset-unaligned": (header(1, 0) + tensor("t", [1], F32, 4) + bytes(64), "not a multiple of the alignment"),
    "overlap": (
        header(2, 0) + tensor("t", [16], F32, 0) + tensor("u", [16], F32, 32) + bytes(256), "tensors t and u overlap",
    ),
    "odd-blocks": (header(1, 0) + tensor("t", [33], Q8_0, 0) + bytes(99), "rows of 33 do not divide into Q8_0 blocks"),
    "type-Q4_K": (header(1, 0) + tensor("t", [256], Q4_K, 0) + bytes(999), "tensor t has type Q4_K, not supported yet"),
    "type-unknown": (header(1, 0) + tensor("t", [32], 4000, 0) + bytes(99), "unknown type 4000"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: pathlib.Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(LoadError, match=message) as error:
        GGUFFile(path)
    assert time.monotonic() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "model.gguf" in str(error.value)


def test_every_cut_of_a_valid_file_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {"a": 1, "b": ["x", "y"], "c": [1.5]}, {"t": (np.ones((2, 32), np.float32), "Q8_0")})
    content = path.read_bytes()
    assert GGUFFile(path).metadata == {"a": 1, "b": ["x", "y"], "c": [1.5]}
    end_of_data = GGUFFile(path).tensors["t"].offset + GGUFFile(path).tensors["t"].num_bytes
    for length in range(end_of_data):
        path.write_bytes(content[:length])
        with pytest.raises(LoadError):
            GGUFFile(path)


def test_flipped_bits_never_cause_anything_but_a_load_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, BY_NAME["llama-tied"])
    content = bytearray(path.read_bytes()[:3000])  # what lies behind is data
    random = np.random.default_rng(0)
    for _ in range(400):
        damaged = content.copy()
        for position in random.integers(0, 1500, 3):
            damaged[position] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(damaged)
        try:
            source = resolve(str(path))
            ModelConfig.from_hf(source.config)
            source.open_tensors()
        except (LoadError, ConfigError):
            pass


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_values_of_every_type(version: int, alignment: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    random = np.random.default_rng(0)
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
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


def test_packed_values_in_many_pieces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models_flax.checkpoint.gguf_reader.CHUNK", 96)
    path = tmp_path / "model.gguf"
    values = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    write_gguf(path, {"general.architecture": "qwen3"}, {"t.weight": (values, "Q4_1")})
    found = GGUFReader(GGUFFile(path)).read("t.weight", F32_DTYPE)
    kind = gguf.GGMLQuantizationType.Q4_1
    np.testing.assert_array_equal(found, gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_model(path: pathlib.Path, model: TinyModel, extra: dict[str, Any] | None = None) -> None:
    """The tiny model as llama.cpp's converter writes it."""
    config, arch = model.config, "llama" if model.config["model_type"] != "qwen3" else "qwen3"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": model.num_kv_heads}
    tensors = {}
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
        ({"llama.expert_count": 8}, "experts are not supported yet"),
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
