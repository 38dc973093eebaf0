"""Qwen3 dense: a Llama with an RMSNorm over each head of queries and keys."""

from functools import partial

from octavo.models_flax import llama
from octavo.models_flax.decoder import Decoder
from octavo.models_flax.registry import Family
from octavo.models_flax.rules import Rule

RULES = (
    *llama.RULES,
    Rule("model.layers.{layer}.self_attn.q_norm.weight", "layers.{layer}.attention.q_norm.scale", "h -> h"),
    Rule("model.layers.{layer}.self_attn.k_norm.weight", "layers.{layer}.attention.k_norm.scale", "h -> h"),
)

FAMILY = Family(build=partial(Decoder, qk_norm=True), rules=RULES, ignored=llama.IGNORED)
