"""GGUF's packed types against their description, bit by bit; memory; and models that mix them."""

import json
import pathlib
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.models_flax.checkpoint import gguf_unpack, resolve
from octavo.models_flax.checkpoint.gguf_unpack import PACKED, unpack
from octavo.models_flax.rope import RopeConfig, make_rope
from tests.references.dense_model import logits_of
from tests.references.gguf_blocks import PACKINGS, decode, random_blocks

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_bytes(kind: str, num_blocks: int) -> np.ndarray:
    return np.random.default_rng(len(kind)).integers(0, 256, num_blocks * PACKINGS[kind].size, np.uint8)


def test_every_type_has_a_description() -> None:
    assert set(PACKED) == set(PACKINGS)


@pytest.mark.parametrize("kind", PACKED)
def test_random_bits_are_the_same_values(kind: str) -> None:
    """All bits random, scales too: infinite ones, ones that are no number, and negative zeros."""
    raw = random_bytes(kind, 96 if PACKINGS[kind].values == 32 else 24)
    with np.errstate(all="ignore"):
        expected = decode(kind, raw)
    np.testing.assert_array_equal(unpack(raw, kind, F32), expected)


@pytest.mark.parametrize("kind", PACKED)
def test_scales_at_their_edges(kind: str) -> None:
    """The smallest and largest halves, and quants of all zeros and all ones."""
    packing = PACKINGS[kind]
    blocks = []
    for fill in (0, 255):
        for half in (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF):
            block = np.full(packing.size, fill, np.uint8)
            for place in (packing.scale_at, packing.minimum_at):
                if place is not None:
                    block[place : place + 2] = (half & 255, half >> 8)
            blocks.append(block)
    raw = np.concatenate(blocks)
    np.testing.assert_array_equal(unpack(raw, kind, F32), decode(kind, raw))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("chunk", [1, 512, 1 << 18])
def test_pieces_join_in_order(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_unpack, "CHUNK", chunk)
    raw = random_blocks(kind, 3, 1024, np.random.default_rng(0)).reshape(-1)
    np.testing.assert_array_equal(unpack(raw, kind, F32), decode(kind, raw))
    np.testing.assert_array_equal(unpack(raw, kind, BF16), decode(kind, raw).astype(BF16))
    assert unpack(raw[:0], kind, F32).size == 0


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_large_tensor_costs_its_own_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries are those of one piece for each thread, also of a tensor of 16 million values."""
    monkeypatch.setattr(gguf_unpack, "MAX_THREADS", 2)
    raw = np.tile(random_blocks(kind, 1, 1 << 16, np.random.default_rng(0))[0], 1 << 8)
    tracemalloc.start()
    try:
        values = unpack(raw, kind, BF16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert values.nbytes == 2 << 24
    assert peak < values.nbytes + (24 << 20)


# Whole models. K types need rows of a multiple of 256.

HEADS, KV_HEADS, HEAD, WIDTH, HIDDEN, VOCAB, LAYERS = 4, 2, 64, 256, 512, 320, 2
SHAPES = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD, WIDTH),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD, WIDTH),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD, WIDTH),
    "attn_output": ("self_attn.o_proj", WIDTH, HEADS * HEAD),
    "ffn_gate": ("mlp.gate_proj", HIDDEN, WIDTH),
    "ffn_up": ("mlp.up_proj", HIDDEN, WIDTH),
    "ffn_down": ("mlp.down_proj", WIDTH, HIDDEN),
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
MIXES = {  # as llama.cpp's quantiser mixes them: (most matrices, attn_v and ffn_down, embedding, output)
    "Q4_K_M": ("Q4_K", "Q6_K", "Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q5_K", "Q6_K"),
    "Q3_K_M": ("Q3_K", "Q5_K", "Q3_K", "Q6_K"),
    "Q2_K": ("Q2_K", "Q3_K", "Q2_K", None),
    "Q5_0": ("Q5_0", "Q5_1", "Q8_0", None),
}


def write_twins(folder: pathlib.Path, arch: str, mix: str, rope_factors: list[float] | None) -> None:
    """model.gguf by the package's writer, and hf/ with what the descriptions of the types say it holds."""
    most, some, embedding, output = MIXES[mix]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, hf: str, rows: int, columns: int, kind: str, interleaved: bool = False) -> None:
        packed = random_blocks(kind, rows, columns, random)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        values = decode(kind, packed)
        if interleaved:  # rows 2i and 2i + 1 of a head turn together: i and i + H / 2 in Hugging Face's order
            values = values.reshape(-1, HEAD // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[hf] = np.ascontiguousarray(values)

    def vector(name: str, hf: str, size: int) -> None:
        weights[hf] = random.uniform(0.5, 1.5, size).astype(np.float32)
        writer.add_tensor(name, weights[hf])

    matrix("token_embd.weight", "model.embed_tokens.weight", VOCAB, WIDTH, embedding or most)
    vector("output_norm.weight", "model.norm.weight", WIDTH)
    if output is not None:
        matrix("output.weight", "lm_head.weight", VOCAB, WIDTH, output)
    for layer in range(LAYERS):
        for name, (hf, rows, columns) in SHAPES.items():
            kind = some if name in ("attn_v", "ffn_down") else most
            turned = arch == "llama" and name in ("attn_q", "attn_k")
            matrix(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{hf}.weight", rows, columns, kind, turned)
        for name, hf in NORMS.items():
            vector(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{hf}.weight", WIDTH)
        if arch == "qwen3":
            for part in "qk":
                hf = f"model.layers.{layer}.self_attn.{part}_norm.weight"
                vector(f"blk.{layer}.attn_{part}_norm.weight", hf, HEAD)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS] * LAYERS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_safetensors(folder / "hf", arch, weights, rope_factors is not None)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def write_safetensors(folder: pathlib.Path, arch: str, weights: dict[str, np.ndarray], scaled: bool) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM" if arch == "llama" else "Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "rope_scaling": {"rope_type": "llama3"} | LLAMA3 if scaled else None,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("arch", "mix"),
    [("llama", "Q4_K_M"), ("qwen3", "Q4_K_M"), ("llama", "Q3_K_M"), ("llama", "Q2_K"), ("qwen3", "Q5_0")],
)
def test_logits_of_a_mixed_file_are_those_of_its_twin(arch: str, mix: str, tmp_path: pathlib.Path) -> None:
    """Rows of queries and keys turned back (llama only), embeddings tied or not, head_count_kv by layer."""
    write_twins(tmp_path, arch, mix, None)
    tokens = list(range(20, 60))
    expected = logits_of(str(tmp_path / "hf"))(tokens)
    assert np.ptp(expected) > 1
    np.testing.assert_array_equal(logits_of(str(tmp_path / "model.gguf"))(tokens), expected)


def test_rope_factors_are_the_scaling_of_llama_3(tmp_path: pathlib.Path) -> None:
    """Files of Llama 3.1 carry `rope_freqs.weight` instead of the four parameters."""
    names = {"original_max_position_embeddings": "original_max_position"}
    scaled = RopeConfig(theta=5e5, kind="llama3", **{names.get(name, name): value for name, value in LLAMA3.items()})
    plain, stretched = (np.asarray(make_rope(rope, HEAD).inv_freq) for rope in (RopeConfig(theta=5e5), scaled))
    write_twins(tmp_path, "llama", "Q5_K_M", (plain / stretched).tolist())
    assert resolve(str(tmp_path / "model.gguf")).config["rope_parameters"]["freq_factors"][-1] == 8.0
    tokens = [*range(20, 200)]  # beyond the original context
    np.testing.assert_allclose(
        logits_of(str(tmp_path / "model.gguf"))(tokens), logits_of(str(tmp_path / "hf"))(tokens), atol=2e-4
    )
