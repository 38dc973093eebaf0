"""Llama 2, 3, 3.1, 3.2 and what shares their form: SmolLM2, Mistral without a window."""

from octavo.models_flax.decoder import Decoder
from octavo.models_flax.registry import Family
from octavo.models_flax.rules import Rule

_HF, _OURS = "model.layers.{layer}", "layers.{layer}"

RULES = (
    Rule("model.embed_tokens.weight", "embed.table", "v d -> v d"),
    Rule(f"{_HF}.input_layernorm.weight", f"{_OURS}.attention_norm.scale", "d -> d"),
    Rule(f"{_HF}.self_attn.q_proj.weight", f"{_OURS}.attention.qkv.weight", "(k g h) d -> d k g h", axis=2),
    Rule(f"{_HF}.self_attn.k_proj.weight", f"{_OURS}.attention.qkv.weight", "(k h) d -> d k 1 h", axis=2),
    Rule(f"{_HF}.self_attn.v_proj.weight", f"{_OURS}.attention.qkv.weight", "(k h) d -> d k 1 h", axis=2),
    Rule(f"{_HF}.self_attn.q_proj.bias", f"{_OURS}.attention.qkv.bias", "(k g h) -> k g h", axis=1),
    Rule(f"{_HF}.self_attn.k_proj.bias", f"{_OURS}.attention.qkv.bias", "(k h) -> k 1 h", axis=1),
    Rule(f"{_HF}.self_attn.v_proj.bias", f"{_OURS}.attention.qkv.bias", "(k h) -> k 1 h", axis=1),
    Rule(f"{_HF}.self_attn.o_proj.weight", f"{_OURS}.attention.out.weight", "d (n h) -> n h d"),
    Rule(f"{_HF}.self_attn.o_proj.bias", f"{_OURS}.attention.out.bias", "d -> d"),
    Rule(f"{_HF}.post_attention_layernorm.weight", f"{_OURS}.mlp_norm.scale", "d -> d"),
    Rule(f"{_HF}.mlp.gate_proj.weight", f"{_OURS}.mlp.gate_up.weight", "f d -> d 1 f", axis=1),
    Rule(f"{_HF}.mlp.up_proj.weight", f"{_OURS}.mlp.gate_up.weight", "f d -> d 1 f", axis=1),
    Rule(f"{_HF}.mlp.gate_proj.bias", f"{_OURS}.mlp.gate_up.bias", "f -> 1 f", axis=0),
    Rule(f"{_HF}.mlp.up_proj.bias", f"{_OURS}.mlp.gate_up.bias", "f -> 1 f", axis=0),
    Rule(f"{_HF}.mlp.down_proj.weight", f"{_OURS}.mlp.down.weight", "d f -> f d"),
    Rule(f"{_HF}.mlp.down_proj.bias", f"{_OURS}.mlp.down.bias", "d -> d"),
    Rule("model.norm.weight", "norm.scale", "d -> d"),
    Rule("lm_head.weight", "head.weight", "v d -> d v"),
)

# Frequencies follow from the config; old checkpoints stored them.
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

FAMILY = Family(build=Decoder, rules=RULES, ignored=IGNORED)
