"""Naive truth: the Llama family and Qwen3 in plain numpy float32, no cache, no batch, everything recomputed each step.

Reads a Hugging Face config and weights by their Hugging Face names. Refuses to import anything of Octavo.
"""

import dataclasses
import math

import numpy as np

from tests.references.naive_sampling import NaiveParams, next_token

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class NaiveModel:
    """A decoder: `config` as in config.json, `weights` by Hugging Face name."""

    config: dict
    weights: dict[str, Array]

    def logits(self, ids: list[int]) -> Array:
        """f32[T, V] of a whole sequence."""
        x = self.weights["model.embed_tokens.weight"][np.asarray(ids)]
        rotation = _rotation(self.config, self._head_dim, len(ids))
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(prefix + "self_attn.", self._norm(prefix + "input_layernorm", x), rotation)
            x = x + self._mlp(prefix + "mlp.", self._norm(prefix + "post_attention_layernorm", x))
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return self._linear(head, self._norm("model.norm", x))

    @property
    def _head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", np.float32(0))

    def _norm(self, name: str, x: Array) -> Array:
        variance = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        return x / np.sqrt(variance + np.float32(self.config["rms_norm_eps"])) * self.weights[f"{name}.weight"]

    def _mlp(self, prefix: str, x: Array) -> Array:
        gate = self._linear(prefix + "gate_proj", x)
        return self._linear(prefix + "down_proj", gate / (1 + np.exp(-gate)) * self._linear(prefix + "up_proj", x))

    def _attention(self, prefix: str, x: Array, rotation: tuple[Array, Array]) -> Array:
        length, size = len(x), self._head_dim
        q, k, v = (self._linear(f"{prefix}{name}_proj", x).reshape(length, -1, size) for name in "qkv")
        if f"{prefix}q_norm.weight" in self.weights:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.float32(math.sqrt(size))
        scores = np.where(np.tri(length, dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return self._linear(prefix + "o_proj", np.einsum("nqk,knh->qnh", weights, v).reshape(length, -1))


@dataclasses.dataclass
class NaiveOutput:
    """One sample: its tokens, the raw log-probabilities f32[V] each was drawn from, and why it ended."""

    token_ids: list[int]
    logprobs: list[Array]
    finish_reason: str


def generate(model: NaiveModel, prompt: list[int], params: NaiveParams) -> NaiveOutput:
    """One sample, the whole sequence recomputed for each token."""
    output = NaiveOutput([], [], "length")
    while len(output.token_ids) < params.max_tokens:
        logits = model.logits(prompt + output.token_ids)[-1]
        token = next_token(logits, prompt, output.token_ids, params)
        output.token_ids.append(token)
        output.logprobs.append(log_softmax(logits))
        if token in params.stop_ids:
            output.finish_reason = "stop"
            break
    return output


def prompt_logprobs(model: NaiveModel, prompt: list[int]) -> Array:
    """f32[T - 1, V]: row i is about token i + 1."""
    return log_softmax(model.logits(prompt)[:-1])


def log_softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(np.float32)


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + H / 2) of [T, heads, H]."""
    cos, sin = (part[:, None, :] for part in rotation)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotation(config: dict, head_dim: int, length: int) -> tuple[Array, Array]:
    """Cosines and sines f32[T, H / 2], with the scaling that the config asks for in either spelling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    amplitude = 1.0
    if kind == "linear":
        frequency = frequency / rope["factor"]
    elif kind == "llama3":
        turns = original * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (keep + (1 - keep) / rope["factor"])
    elif kind == "yarn":
        frequency, amplitude = _yarn(rope, frequency, theta, original)
    elif kind != "default":
        raise NotImplementedError(f"rope type {kind}")
    angle = np.arange(length)[:, None] * frequency
    return (np.cos(angle) * amplitude).astype(np.float32), (np.sin(angle) * amplitude).astype(np.float32)


def _yarn(rope: dict, frequency: Array, theta: float, original: int) -> tuple[Array, float]:
    """YaRN (Peng et al., 2023): a ramp between interpolated and unchanged frequencies, and an attention temperature."""
    factor, half = rope["factor"], len(frequency)

    def dimension(turns: float) -> float:
        """Which of the 2 * half dimensions turns that many times over the original context."""
        return 2 * half * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = rope.get("attention_factor")
    if amplitude is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        amplitude = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if both else mscale(1.0)
    return frequency * (ramp / factor + 1 - ramp), amplitude
