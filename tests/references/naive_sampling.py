"""Naive truth of sampling: one row, numpy, sorts and loops, in the order that the engine promises.

Noise alone is jax's: what (seed, position) gives is a definition, not a computation that could be checked.
"""

import collections
import dataclasses

import jax
import numpy as np

Array = np.ndarray
NEVER = np.float32(-np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaiveParams:
    """What decides the next token. `eos_ids` are empty when the request ignores EOS."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = dataclasses.field(default_factory=list)
    eos_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> set[int]:
        return {*self.eos_ids, *self.stop_token_ids}


def next_token(logits: Array, prompt: list[int], output: list[int], params: NaiveParams) -> int:
    """Greedy at temperature 0, else one draw with the noise of (seed, position)."""
    x = constrain(logits, prompt, output, params)
    if params.temperature == 0:
        return int(np.argmax(x))
    x = truncate(x / np.float32(params.temperature), params)
    return int(np.argmax(x + noise(params.seed, len(prompt) + len(output), len(x))))


def constrain(logits: Array, prompt: list[int], output: list[int], params: NaiveParams) -> Array:
    """Everything before temperature: penalties, logit_bias, allowed_token_ids, bad_words, min_tokens."""
    x = logits.astype(np.float32).copy()
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in collections.Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x = _ban(x, set(range(len(x))) - set(params.allowed_token_ids))
    history = [*prompt, *output]
    ends = {word[-1] for word in params.bad_words if len(word) == 1 or history[1 - len(word) :] == word[:-1]}
    x = _ban(x, ends)
    return _ban(x, params.stop_ids) if len(output) < params.min_tokens else x


def truncate(x: Array, params: NaiveParams) -> Array:
    """top_k, then top_p of what is left, then min_p; equal candidates at a threshold all stay."""
    if params.top_k > 0:
        x = np.where(x >= np.sort(x)[-min(params.top_k, len(x))], x, NEVER)
    if params.top_p < 1:
        chance = _softmax(x)
        order = np.argsort(-chance, kind="stable")
        before = np.cumsum(chance[order]) - chance[order]
        kept = order[before < params.top_p]
        x = np.where(chance >= chance[kept].min(), x, NEVER)
    if params.min_p > 0:
        chance = _softmax(x)
        x = np.where(chance >= params.min_p * chance.max(), x, NEVER)
    return x


def noise(seed: int, position: int, size: int) -> Array:
    """f32[V], Gumbel: jax's Threefry counter at (seed, position)."""
    return np.asarray(jax.random.gumbel(jax.random.fold_in(jax.random.key(np.uint32(seed)), position), (size,)))


def _ban(x: Array, ids: set[int]) -> Array:
    """Bans ids, unless that would leave nothing."""
    banned = x.copy()
    banned[sorted(ids)] = NEVER
    return banned if np.isfinite(banned).any() else x


def _softmax(x: Array) -> Array:
    weight = np.exp(x.astype(np.float64) - x.max())
    return weight / weight.sum()
