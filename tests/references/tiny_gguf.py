"""A tiny model as one GGUF file, in the layout that llama.cpp's converter writes."""

import pathlib

import gguf
import numpy as np

from tests.references.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, vocabulary
from tests.references.tiny_models import TinyModel, make_weights

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MERGES = ["Ä ı"]  # makes the piece U+010F of two bytes; there must be one, since the writer leaves out empty lists
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: TinyModel, path: pathlib.Path, kind: str) -> dict[str, np.ndarray]:
    """Writes matrices as `kind` (F32, F16, BF16, Q8_0, Q4_0, Q4_1) and vectors as F32.

    Returns the weights that a reader should find, by Hugging Face name: what is left of them after `kind`.
    """
    architecture = "qwen3" if model.config["model_type"] == "qwen3" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, model)
    quantisation = gguf.GGMLQuantizationType[kind]
    kept = {}
    for name, value in make_weights(model.name).items():
        stem, suffix = name.rsplit(".", 1)
        heads = {"q_proj": model.config["num_attention_heads"], "k_proj": model.num_kv_heads}.get(stem.split(".")[-1])
        permuted = heads is not None and architecture == "llama"
        stored = _interleave(value, heads) if permuted and heads else value
        if value.ndim == 1:
            writer.add_tensor(_gguf_name(stem, suffix), stored)
            kept[name] = value
            continue
        data = gguf.quantize(stored, quantisation)
        writer.add_tensor(_gguf_name(stem, suffix), data, raw_dtype=quantisation)
        restored = gguf.dequantize(data, quantisation)
        kept[name] = _separate(restored, heads) if permuted and heads else restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _gguf_name(stem: str, suffix: str) -> str:
    if not stem.startswith("model.layers."):
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{suffix}"


def _interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rotary rows (i, i + H / 2) become neighbours, as the llama architecture of GGUF has them."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _separate(value: np.ndarray, heads: int) -> np.ndarray:
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _add_metadata(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    config = model.config
    writer.add_name(model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_vocab_size(config["vocab_size"])
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (config["vocab_size"] - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary(config["vocab_size"]))
    writer.add_token_types(types)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
