"""Rotary position embedding (Su et al. 2021) with the context extensions of `RopeConfig`.

Frequencies are made once, in numpy float64, and are static: they end up as constants
of the compiled step. Positions are rotated in float32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from octavo.configs.model import RopeConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """What rotates queries and keys.

    Attributes:
      inv_freq: H / 2 angles per position, in radians.
      attention_factor: what cos and sin are multiplied with.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """i32[T] -> (cos, sin), each f32[T, H / 2]; made once a step, read by every layer."""
        angles = positions.astype(jnp.float32)[:, None] * np.asarray([self.inv_freq], np.float32)
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def make_rope(config: RopeConfig, head_dim: int) -> Rope:
    """The frequencies of one kind of rope for heads of `head_dim` (H)."""
    inv_freq = config.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    attention_factor = 1.0
    match config.kind:
        case "linear":  # positions interpolated (Chen et al. 2023)
            inv_freq = inv_freq / config.factor
        case "llama3":
            inv_freq = _llama3(config, inv_freq)
        case "yarn":
            inv_freq = _yarn(config, inv_freq, head_dim)
            attention_factor = _yarn_attention_factor(config)
    if config.freq_factors is not None:
        inv_freq = inv_freq / np.asarray(config.freq_factors)
    return Rope(tuple(inv_freq.tolist()), attention_factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, heads, H] in float32; dimension i pairs with i + H / 2, as Hugging Face checkpoints store it."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    turns = _original(config) * base / (2 * math.pi)  # over the original context
    kept = np.clip((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0.0, 1.0)
    return (1 - kept) * base / config.factor + kept * base


def _yarn(config: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.2: dimensions that turn often keep their frequency."""

    def dimension(turns: float) -> float:  # whose wavelength makes so many turns over the original context
        return head_dim * math.log(_original(config) / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return (1 - stretched) * base + stretched * base / config.factor


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(multiplier: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * multiplier * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _original(config: RopeConfig) -> int:
    if config.original_max_position is None:
        raise ValueError(f"rope kind {config.kind} needs original_max_position")  # RopeConfig refuses it earlier
    return config.original_max_position
