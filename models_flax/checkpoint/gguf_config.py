"""GGUF metadata in config.json's words, so that one adapter serves both formats.

Refuses architectures that we do not have, experts, heads that differ between layers, files in parts, and by name
whatever else would change what the model computes.
"""

import math
import reprlib
from typing import Any

import numpy as np

from octavo.configs.errors import LoadError
from octavo.models_flax.checkpoint.gguf_file import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
MAX_FACTORS = 4096
# What llama.cpp computes differently where one of these is set.
UNSUPPORTED = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
# Control tokens that end an answer; files name only some of them (eos, eot, eom).
ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say about this file's model."""
    keys = file.metadata
    arch = keys.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise LoadError(
            f"general.architecture {reprlib.repr(arch)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_what_we_lack(keys, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LoadError("the file lacks token_embd.weight, or it is not a matrix")

    def get(name: str, default: Any = None) -> Any:
        return uniform(file, f"{arch}.{name}", default)

    heads = get("attention.head_count")
    key_size = get("attention.key_length")
    if get("attention.value_length", key_size) != key_size:
        raise LoadError(f"{arch}.attention.value_length differs from key_length, which is not supported")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": embedding.shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": key_size,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(keys),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_parameters": _rope(file, arch),
    }
    if config["head_dim"] is None and isinstance(heads, int) and isinstance(config["hidden_size"], int) and heads > 0:
        config["head_dim"] = config["hidden_size"] // heads
    rotated = get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise LoadError(f"{arch}.rope.dimension_count {rotated} differs from the head size, which is not supported")
    return config


def uniform(file: GGUFFile, key: str, default: Any = None) -> Any:
    """A metadata value that may be given per layer, if all layers have the same."""
    value = file.metadata.get(key, default)
    if not isinstance(value, list):
        return value
    if not value or any(entry != value[0] for entry in value):
        raise LoadError(f"{key} differs between layers, which is not supported")
    return value[0]


def _refuse_what_we_lack(keys: dict[str, Any], arch: str) -> None:
    if keys.get("split.count", 0) not in (0, 1):
        count = reprlib.repr(keys["split.count"])
        raise LoadError(f"split.count {count}: one file of several; join them with llama-gguf-split --merge")
    for key, value in keys.items():
        name = key.removeprefix(f"{arch}.")
        if name.startswith("expert_") and value:
            raise LoadError(f"{key} {reprlib.repr(value)}: experts are not supported yet")
        if name in UNSUPPORTED and value:
            raise LoadError(f"{key} {reprlib.repr(value)} is not supported")
        if name == "attention.causal" and value is not True:
            raise LoadError(f"{key} {reprlib.repr(value)} is not supported")
    window, context = keys.get(f"{arch}.attention.sliding_window"), keys.get(f"{arch}.context_length")
    if window and not (isinstance(window, int) and isinstance(context, int) and window >= context):
        raise LoadError(f"{arch}.attention.sliding_window {reprlib.repr(window)} is not supported yet")


def _ends(keys: dict[str, Any]) -> list[Any]:
    """The ids that end an answer: those that the file names, then control tokens known for it."""
    ids = [
        keys[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in keys
    ]
    tokens, types = keys.get("tokenizer.ggml.tokens"), keys.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        control = 3
        ids += [
            i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == control and token in ENDS
        ]
    return ids


def _rope(file: GGUFFile, arch: str) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling"
    keys = file.metadata
    kind = keys.get(f"{prefix}.type", "none")
    factor = keys.get(f"{prefix}.factor", 1.0)
    if not isinstance(factor, float | int):
        raise LoadError(f"{prefix}.factor must be a number, got {reprlib.repr(factor)}")
    if kind == "none" and keys.get(f"{arch}.rope.scale_linear"):  # what old files say
        kind, factor = "linear", keys[f"{arch}.rope.scale_linear"]
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if kind != "none":
        rope["factor"] = factor
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.get(f"{prefix}.original_context_length")
        rope["beta_fast"] = keys.get(f"{prefix}.yarn_beta_fast")
        rope["beta_slow"] = keys.get(f"{prefix}.yarn_beta_slow")
        for name in ("attn_factor", "yarn_attn_factor"):
            multiplier = keys.get(f"{prefix}.{name}")
            if isinstance(multiplier, float | int) and multiplier != 1.0:
                # llama.cpp multiplies it with YaRN's own factor, Hugging Face replaces that.
                rope["attention_factor"] = multiplier * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    if ROPE_FACTORS in file.tensors:
        tensor = file.tensors[ROPE_FACTORS]
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise LoadError(
                f"{ROPE_FACTORS} must be a vector of up to {MAX_FACTORS} F32, got {tensor.kind} of shape {tensor.shape}"
            )
        rope["freq_factors"] = file.data(ROPE_FACTORS).view(np.float32).tolist()
    return rope
