"""The shape of a model in our own words, and the only place that tolerates Hugging Face spellings.

Refuses what the models cannot compute (sliding windows, other rope kinds, quantised
checkpoints, unknown architectures) by name, and never runs code that a checkpoint brings.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from octavo.configs.errors import ConfigError, LoadError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
MAX_LAYERS = 4096  # a count beyond it is damage or malice, and building such a model would take forever


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: the base of the wavelengths.
      kind: one of default, linear, llama3, yarn.
      factor: how much longer the context became (not for default).
      original_max_position: context length before scaling (llama3 and yarn).
      low_freq_factor, high_freq_factor: llama3's band of interpolated wavelengths.
      beta_fast, beta_slow: yarn's band, in rotations over the original context.
      mscale, mscale_all_dim: yarn's attention factor as a ratio of two scales.
      attention_factor: what cos and sin are multiplied with, where the checkpoint says so.
      truncate: yarn rounds its band outwards to whole dimensions.
      freq_factors: H / 2 divisors of the inverse frequencies; GGUF files carry llama3
        scaling in this form, with kind default.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ConfigError(f"rope_theta must be a finite number above 1, got {self.theta}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"rope factor must be a finite positive number, got {self.factor}")
        if self.kind in ("llama3", "yarn") and (self.original_max_position is None or self.original_max_position < 1):
            raise ConfigError(
                f"rope type {self.kind} needs original_max_position_embeddings, got {self.original_max_position}"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        if self.freq_factors is not None and not all(math.isfinite(f) and f > 0 for f in self.freq_factors):
            raise ConfigError("rope freq_factors must be finite positive numbers")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder, by the axis alphabet: V, D, F, L, N, K, H."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # union of config.json and generation_config.json

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ConfigError(f"rms_norm_eps must be a finite number of at least 0, got {self.rms_norm_eps}")
        factors = self.rope.freq_factors
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ConfigError(
                f"rope freq_factors must have head_dim / 2 = {self.head_dim // 2} entries, got {len(factors)}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> Self:
        """Reads the contents of config.json and, where there is one, generation_config.json.

        Missing entries get transformers' defaults for the architecture; sizes must be there.

        Raises:
          ConfigError: an unknown architecture, or something that we cannot compute.
          LoadError: the checkpoint asks to run code of its own (`auto_map`).
        """
        refuse_remote_code(config, "config.json")
        refuse_remote_code(generation_config or {}, "generation_config.json")
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        if (quantization := config.get("quantization_config")) is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise ConfigError(f"quantization_config with quant_method {method!r} is not supported yet")
        heads = _size(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        head_dim = _integer(config, "head_dim", family.head_dim)
        if head_dim is None:
            if hidden % heads:
                raise ConfigError(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
            head_dim = hidden // heads
        kv_default = family.num_kv_heads if "num_key_value_heads" not in config else None
        max_position = _size(config, "max_position_embeddings", family.max_position_embeddings)
        _refuse_window(config, architecture, max_position)
        vocab = _integer(config, "vocab_size")
        attention_bias = family.attention_bias and _flag(config, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", kv_default or heads),
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            hidden_act=_activation(config),
            rope=_rope(config, max_position),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=attention_bias,
            # Hugging Face has one flag for all four; GGUF files can differ and say so in a key of our own.
            attention_out_bias=_flag(config, "attention_out_bias", attention_bias),
            mlp_bias=family.mlp_bias and _flag(config, "mlp_bias"),
            bos_token_id=_integer(config, "bos_token_id", family.bos_token_id),
            eos_token_ids=_eos(config, generation_config or {}, family, vocab),
        )


@dataclasses.dataclass(frozen=True)
class _Family:
    """What transformers assumes where config.json is silent, and which biases its modules have."""

    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    attention_bias: bool = True
    mlp_bias: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(2048, bos_token_id=1, eos_token_id=2, mlp_bias=True),
    "MistralForCausalLM": _Family(131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2, attention_bias=False),
    "Qwen3ForCausalLM": _Family(32768, num_kv_heads=32, head_dim=128),
}
ARCHITECTURES = tuple(_FAMILIES)

_HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def refuse_remote_code(value: object, where: str, path: str = "") -> None:
    """Raises LoadError where `auto_map` lies anywhere in `value`: checkpoints bring data, never code."""
    stack = [(value, path)]
    while stack:
        item, path = stack.pop()
        if isinstance(item, Mapping):
            if item.get("auto_map"):
                raise LoadError(
                    f"{where} asks to run code of its own ({path}auto_map); Octavo never runs code from a checkpoint"
                )
            stack.extend((child, f"{path}{key}.") for key, child in item.items())
        elif isinstance(item, list):
            stack.extend((child, path) for child in item)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"config.json names no architectures; supported: {', '.join(ARCHITECTURES)}")
    for name in names:
        if isinstance(name, str) and name in _FAMILIES:
            return name
    raise ConfigError(
        f"architecture {', '.join(map(str, names))} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_window(config: Mapping[str, Any], architecture: str, max_position: int) -> None:
    if architecture == "MistralForCausalLM":
        window = _integer(config, "sliding_window", None) if "sliding_window" in config else 4096
        if window is not None and window < max_position:
            raise ConfigError(
                f"sliding_window {window}, smaller than max_position_embeddings ({max_position}), is not supported yet"
            )
    if architecture == "Qwen3ForCausalLM" and _flag(config, "use_sliding_window"):
        raise ConfigError("use_sliding_window is not supported yet")


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Merges `rope_parameters` (new) or `rope_scaling` (old) with the top-level rope_theta."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise ConfigError(f"rope parameters must be one flat table, got {scaling!r}")
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = _number(scaling, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported yet")
    factors = _freq_factors(scaling)
    if kind == "default":
        return RopeConfig(theta=theta, freq_factors=factors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_number(scaling, "factor"), freq_factors=factors)
    original = _size(
        config, "original_max_position_embeddings", _size(scaling, "original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_number(scaling, "factor"),
            original_max_position=original,
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            freq_factors=factors,
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_number(scaling, "factor", max_position / original),
        original_max_position=original,
        beta_fast=_number(scaling, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(scaling, "beta_slow", 1.0) or 1.0,
        mscale=_number(scaling, "mscale", None),
        mscale_all_dim=_number(scaling, "mscale_all_dim", None),
        attention_factor=_number(scaling, "attention_factor", None),
        truncate=_flag(scaling, "truncate", True),
        freq_factors=factors,
    )


def _freq_factors(scaling: Mapping[str, Any]) -> tuple[float, ...] | None:
    factors = scaling.get("freq_factors")
    if factors is None:
        return None
    if not isinstance(factors, list):
        raise ConfigError(f"rope freq_factors must be a list of numbers, got {factors!r}")
    return tuple(_float("rope freq_factors", factor) for factor in factors)


def _eos(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], family: _Family, vocab: int
) -> tuple[int, ...]:
    """The union, in order of appearance; ids that the vocabulary lacks can never be sampled and are dropped."""
    ids: dict[int, None] = {}
    for value in (config.get("eos_token_id", family.eos_token_id), generation_config.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise ConfigError(f"eos_token_id must be an integer or a list of integers, got {value!r}")
            if 0 <= token < vocab:
                ids[token] = None
    return tuple(ids)


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _HF_ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported; supported: {', '.join(_HF_ACTIVATIONS)}")
    return _HF_ACTIVATIONS[name]


_REQUIRED: Any = object()


def _integer(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    value = config.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"config.json lacks {name}")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if abs(value) >= 2**63:
        raise ConfigError(f"{name} must fit into 64 bits, got {value}")
    return value


def _size(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    value = _integer(config, name, default)
    if value < 1:
        raise ConfigError(f"{name} must be positive, got {value}")
    return value


def _number(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    value = config.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"config.json lacks {name}")
        return default
    return _float(name, value)


def _float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be a finite number, got {value}")
    return number


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
    return value
