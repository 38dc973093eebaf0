"""Device state: one donated pytree that flows through every program. Its leaves never change shape.

Z slots, the last of which is scratch for padded rows; C constrained rows, likewise.
Loading a slot happens here, on the device, from one packed vector; deciding when does not.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from octavo.engine.plan import SlotLoad
from octavo.engine.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

NOTHING = -1  # an empty cell of an id list


@dataclasses.dataclass(frozen=True)
class StateShape:
    """The sizes that fix every leaf: static, part of each program."""

    num_slots: int  # Z, scratch included
    max_model_len: int
    max_blocks: tuple[int, ...]  # P per KV group
    vocab_size: int  # V, the logits' width
    num_constrained: int  # C, scratch included
    max_drafts: int = 0

    @property
    def mask_words(self) -> int:
        """u32 words that hold one bit a vocabulary entry."""
        return -(-self.vocab_size // 32)


@flax.struct.dataclass
class SamplingState:
    """Per slot, what `SlotParams` says; loaded on admission, constant after that."""

    temperature: jax.Array  # f32[Z]
    top_k: jax.Array  # i32[Z], 0 is off
    top_p: jax.Array  # f32[Z]
    min_p: jax.Array  # f32[Z]
    presence_penalty: jax.Array  # f32[Z]
    frequency_penalty: jax.Array  # f32[Z]
    repetition_penalty: jax.Array  # f32[Z]
    seed: jax.Array  # i32[Z], the bits of a u32
    min_length: jax.Array  # i32[Z]
    constrained_row: jax.Array  # i32[Z], the scratch row for none
    adapter: jax.Array  # i32[Z]
    position_delta: jax.Array  # i32[Z]
    stop_ids: jax.Array  # i32[Z, MAX_STOP_TOKEN_IDS]
    bias_ids: jax.Array  # i32[Z, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # f32[Z, MAX_LOGIT_BIAS]
    bad_words: jax.Array  # i32[Z, MAX_BAD_WORDS, MAX_BAD_WORD_LEN], right-aligned


@flax.struct.dataclass
class Slots:
    """Per slot, where its sequence stands."""

    tokens: jax.Array  # i32[Z, max_model_len], prompt and output
    num_computed: jax.Array  # i32[Z]
    prompt_len: jax.Array  # i32[Z]
    drafts: jax.Array  # i32[Z, max_drafts]
    block_tables: tuple[jax.Array, ...]  # per KV group i32[Z, P]
    sampling: SamplingState


@flax.struct.dataclass
class Constrained:
    """The pool of rows for requests with penalties or allowed ids."""

    counts: jax.Array  # i32[C, V], output tokens
    prompt_seen: jax.Array  # u32[C, V / 32]
    allowed: jax.Array  # u32[C, V / 32]


@flax.struct.dataclass
class DeviceState:
    """Everything that changes from step to step."""

    kv: tuple[Any, ...]  # per layer, what the attention op's cache_spec says
    slots: Slots
    constrained: Constrained


def empty_slots(shape: StateShape) -> Slots:
    """All slots free, the scratch slot's table on the null block."""
    z = shape.num_slots
    floats = {name: jnp.zeros(z) for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty")}
    floats |= {name: jnp.ones(z) for name in ("top_p", "repetition_penalty")}
    ints = {name: jnp.zeros(z, jnp.int32) for name in ("top_k", "seed", "min_length", "adapter", "position_delta")}
    return Slots(
        tokens=jnp.zeros((z, shape.max_model_len), jnp.int32),
        num_computed=jnp.zeros(z, jnp.int32),
        prompt_len=jnp.zeros(z, jnp.int32),
        drafts=jnp.zeros((z, shape.max_drafts), jnp.int32),
        block_tables=tuple(jnp.zeros((z, p), jnp.int32) for p in shape.max_blocks),
        sampling=SamplingState(
            **floats,
            **ints,
            constrained_row=jnp.full(z, shape.num_constrained - 1, jnp.int32),
            stop_ids=jnp.full((z, MAX_STOP_TOKEN_IDS), NOTHING, jnp.int32),
            bias_ids=jnp.full((z, MAX_LOGIT_BIAS), NOTHING, jnp.int32),
            bias_values=jnp.zeros((z, MAX_LOGIT_BIAS)),
            bad_words=jnp.full((z, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NOTHING, jnp.int32),
        ),
    )


def empty_constrained(shape: StateShape) -> Constrained:
    """No counts, nothing seen, everything allowed."""
    words = (shape.num_constrained, shape.mask_words)
    return Constrained(
        counts=jnp.zeros((shape.num_constrained, shape.vocab_size), jnp.int32),
        prompt_seen=jnp.zeros(words, jnp.uint32),
        allowed=jnp.full(words, 0xFFFFFFFF, jnp.uint32),
    )


_LOAD_INTS = ("top_k", "seed", "min_length", "constrained_row", "adapter", "position_delta")
_LOAD_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def pack_slot_load(load: SlotLoad, shape: StateShape) -> np.ndarray:
    """One i32 vector of a fixed length: scalars | lists | block tables | tokens."""
    p = load.params
    row = load.constrained_row if load.constrained_row >= 0 else shape.num_constrained - 1
    ints = (p.top_k, np.uint32(p.seed).view(np.int32), p.min_length, row, 0, 0)
    floats = np.array([getattr(p, name) for name in _LOAD_FLOATS], np.float32)
    bias_ids, bias_values = list(p.logit_bias), np.array(list(p.logit_bias.values()), np.float32)
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NOTHING, np.int32)
    for i, word in enumerate(p.bad_words):
        bad_words[i, -len(word) :] = word
    parts = [
        np.array([load.slot, load.prompt_len, load.num_computed, *ints], np.int32),
        floats.view(np.int32),
        _filled(p.stop_ids, MAX_STOP_TOKEN_IDS, NOTHING),
        _filled(bias_ids, MAX_LOGIT_BIAS, NOTHING),
        _filled(bias_values.view(np.int32), MAX_LOGIT_BIAS, 0),
        bad_words.ravel(),
        *(_filled(ids, size, 0) for ids, size in zip(load.block_ids, shape.max_blocks, strict=True)),
        _filled(load.token_ids, shape.max_model_len, 0),
    ]
    return np.concatenate(parts)


def load_slot(slots: Slots, packed: jax.Array, shape: StateShape) -> Slots:
    """Writes one slot from `pack_slot_load`'s vector."""
    take = _Reader(packed)
    slot, prompt_len, num_computed = (take.scalar() for _ in range(3))
    ints = {name: take.scalar() for name in _LOAD_INTS}
    floats = {name: _as_float(take.scalar()) for name in _LOAD_FLOATS}
    lists = {
        "stop_ids": take.vector(MAX_STOP_TOKEN_IDS),
        "bias_ids": take.vector(MAX_LOGIT_BIAS),
        "bias_values": _as_float(take.vector(MAX_LOGIT_BIAS)),
        "bad_words": take.vector(MAX_BAD_WORDS * MAX_BAD_WORD_LEN).reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
    }
    tables = tuple(table.at[slot].set(take.vector(table.shape[1])) for table in slots.block_tables)
    sampling = SamplingState(
        **{name: getattr(slots.sampling, name).at[slot].set(value) for name, value in (ints | floats | lists).items()}
    )
    return Slots(
        tokens=slots.tokens.at[slot].set(take.vector(shape.max_model_len)),
        num_computed=slots.num_computed.at[slot].set(num_computed),
        prompt_len=slots.prompt_len.at[slot].set(prompt_len),
        drafts=slots.drafts,
        block_tables=tables,
        sampling=sampling,
    )


def packed_slot_load_size(shape: StateShape) -> int:
    """Length of `pack_slot_load`'s vector."""
    lists = MAX_STOP_TOKEN_IDS + 2 * MAX_LOGIT_BIAS + MAX_BAD_WORDS * MAX_BAD_WORD_LEN
    return 3 + len(_LOAD_INTS) + len(_LOAD_FLOATS) + lists + sum(shape.max_blocks) + shape.max_model_len


def pack_constrained_load(load: SlotLoad, shape: StateShape) -> np.ndarray:
    """One i32 vector: row, slot, number of tokens, and the bits of the allowed ids."""
    allowed = np.zeros(shape.mask_words * 32, bool)
    allowed[slice(None) if load.params.allowed_token_ids is None else load.params.allowed_token_ids] = True
    bits = np.packbits(allowed, bitorder="little").view(np.int32)
    return np.concatenate([np.array([load.constrained_row, load.slot, len(load.token_ids)], np.int32), bits])


def load_constrained(constrained: Constrained, slots: Slots, packed: jax.Array, shape: StateShape) -> Constrained:
    """Fills one constrained row from its slot's tokens (loaded before) and the allowed bits."""
    row, slot, num_tokens = packed[0], packed[1], packed[2]
    tokens, position = slots.tokens[slot], jnp.arange(shape.max_model_len, dtype=jnp.int32)
    in_prompt = position < slots.prompt_len[slot]
    in_output = ~in_prompt & (position < num_tokens)
    size = shape.vocab_size
    seen = jnp.zeros(shape.mask_words * 32, bool).at[jnp.where(in_prompt, tokens, size)].set(True)
    seen = jnp.where(jnp.arange(shape.mask_words * 32) < size, seen, False)
    weights = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    seen_words = jnp.sum(seen.reshape(-1, 32).astype(jnp.uint32) * weights[None, :], axis=1, dtype=jnp.uint32)
    counts = jnp.zeros(size, jnp.int32).at[jnp.where(in_output, tokens, size)].add(1, mode="drop")
    return Constrained(
        counts=constrained.counts.at[row].set(counts),
        prompt_seen=constrained.prompt_seen.at[row].set(seen_words),
        allowed=constrained.allowed.at[row].set(jax.lax.bitcast_convert_type(packed[3:], jnp.uint32)),
    )


def bit_mask(words: jax.Array, vocab_size: int) -> jax.Array:
    """u32[…, V / 32] -> bool[…, V], the lowest bit first."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32).reshape((1,) * words.ndim + (32,))) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab_size].astype(bool)


def _filled(values: "list[int] | np.ndarray", size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def _as_float(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


class _Reader:
    """Takes a packed vector apart from its front; offsets are static."""

    def __init__(self, packed: jax.Array) -> None:
        self._packed, self._at = packed, 0

    def scalar(self) -> jax.Array:
        return self.vector(1)[0]

    def vector(self, size: int) -> jax.Array:
        self._at += size
        return jax.lax.slice_in_dim(self._packed, self._at - size, self._at)
