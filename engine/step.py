"""One step of the engine as one pure function: (weights, state, packed plan) -> (state, Sampled).

table edits -> embed -> layers -> gather the positions that need logits -> logits -> sample
-> write back. Nothing here reads the host; every size is static.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from octavo.configs.cache import KVSpec
from octavo.engine import sampling
from octavo.engine.batch import Batch, unpack
from octavo.engine.buckets import FULL, LOGPROBS, PROMPT, VARIANTS, Program
from octavo.engine.plan import PromptLogprobs, SampledHost
from octavo.engine.state import DeviceState, Slots, StateShape
from octavo.models_flax.inputs import ForwardContext
from octavo.pallas_kernels.ragged_paged_attention.api import MakeCacheSpec, Tiling, cache_spec, prepare
from octavo.pallas_kernels.sample import Sampler
from octavo.pallas_kernels.sample.reference import logprob_of

PROMPT_CHUNK = 128  # positions whose logits exist at once when prompt log-probabilities are asked for


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step's code depends on besides its program: static."""

    shape: StateShape
    groups: tuple[KVSpec, ...]
    block_size: int
    tiling: Tiling
    attend: Callable[..., Any]
    sampled_vocab_size: int
    max_logprobs: int
    sampler: Sampler
    cache_spec: MakeCacheSpec = cache_spec


@flax.struct.dataclass
class Sampled:
    """What a step gives back, packed so that it takes one copy to the host, or two with prompt log-probabilities.

    Attributes:
      rows: i32[R, 3 or 4 + 2M]: token, finite, log-probability | rank, top ids, their log-probabilities.
      prompt: i32[T, 2 + 2M] about the token that follows each one: log-probability, rank, top ids and theirs.
    """

    rows: jax.Array
    prompt: jax.Array | None


def step(
    merge: Callable[[tuple[jax.Array, ...]], Any],
    config: StepConfig,
    program: Program,
    weights: tuple[jax.Array, ...],
    state: DeviceState,
    packed: jax.Array,
) -> tuple[DeviceState, Sampled]:
    """Runs one plan. `merge` makes the model from its weights; the first three are static."""
    num_tokens, num_rows, variant = program
    model = merge(weights)
    batch = unpack(packed, num_rows, len(config.groups))
    slots = _edit_tables(state.slots, batch)

    start = slots.num_computed[batch.slot]
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(batch.q_len, dtype=jnp.int32)])
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = jnp.where(real, start[row] + token - cu_q_lens[row], 0)
    ids = jnp.where(real, slots.tokens[batch.slot[row], position], 0)

    kv_lens = jnp.where(batch.q_len > 0, start + batch.q_len, 0)
    plans = tuple(
        prepare(
            kv_lens,
            slots.block_tables[group][batch.slot],
            cu_q_lens,
            batch.num_decode,
            num_tokens=num_tokens,
            block_size=config.block_size,
            tiling=config.tiling,
        )
        for group in range(len(config.groups))
    )
    context = ForwardContext(
        positions=position + slots.sampling.position_delta[batch.slot[row]], plans=plans, attend=config.attend
    )
    hidden, kv = model(ids, context, state.kv)

    logit_index = jnp.maximum(cu_q_lens[1:] - 1, 0)  # G = R: each row's last token
    logits = model.logits(hidden[logit_index], context)
    full = VARIANTS.index(variant) >= VARIANTS.index(FULL)
    chosen = sampling.sample(
        logits,
        slots,
        state.constrained,
        batch.slot,
        start + batch.q_len,
        full=full,
        vocab_size=config.sampled_vocab_size,
        sampler=config.sampler,
    )
    columns = [chosen.token, chosen.finite.astype(jnp.int32), _bits(chosen.logprob)]
    if VARIANTS.index(variant) >= VARIANTS.index(LOGPROBS):
        columns += _top_columns(logits, chosen.token, config)
    prompt = None
    if variant == PROMPT:
        following = slots.tokens[batch.slot[row], jnp.minimum(position + 1, config.shape.max_model_len - 1)]
        prompt = _prompt_logprobs(model, context, hidden, following, config)

    constrained = state.constrained
    if full:
        rows = slots.sampling.constrained_row[batch.slot]
        constrained = sampling.count_tokens(constrained, rows, chosen.token, batch.samples)
    state = DeviceState(kv=kv, slots=_write_back(slots, batch, start, chosen.token), constrained=constrained)
    return state, Sampled(rows=_stack(columns), prompt=prompt)


def to_host(sampled: Sampled, max_logprobs: int) -> SampledHost:
    """Waits for a step's results and takes them apart (numpy views)."""
    rows = np.asarray(sampled.rows)
    ranks, top_ids, top_logprobs = _split_top(rows[:, 3:], max_logprobs) if rows.shape[1] > 3 else (None, None, None)
    prompt = None
    if sampled.prompt is not None:
        columns = np.asarray(sampled.prompt)
        prompt = PromptLogprobs(_floats(columns[:, 0]), *_split_top(columns[:, 1:], max_logprobs))
    return SampledHost(
        tokens=rows[:, :1],
        num_accepted=np.ones(len(rows), np.int32),
        finite=rows[:, 1].astype(bool),
        logprobs=_floats(rows[:, 2:3]),
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt,
    )


def _edit_tables(slots: Slots, batch: Batch) -> Slots:
    tables = tuple(
        table.at[edits[0], edits[1]].set(edits[2]) for table, edits in zip(slots.block_tables, batch.edits, strict=True)
    )
    return dataclasses.replace(slots, block_tables=tables)


def _write_back(slots: Slots, batch: Batch, start: jax.Array, token: jax.Array) -> Slots:
    """The next step finds its input token and its positions here, with no word from the host."""
    end = start + batch.q_len
    nowhere = slots.tokens.shape[1]
    return dataclasses.replace(
        slots,
        num_computed=slots.num_computed.at[batch.slot].set(end),
        tokens=slots.tokens.at[batch.slot, jnp.where(batch.samples, end, nowhere)].set(token, mode="drop"),
    )


def _prompt_logprobs(
    model: Any, context: ForwardContext, hidden: jax.Array, following: jax.Array, config: StepConfig
) -> jax.Array:
    """i32[T, 2 + 2M], PROMPT_CHUNK positions at a time so that no [T, V] array exists."""
    num_tokens = hidden.shape[0]
    padding = -num_tokens % PROMPT_CHUNK
    chunks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, PROMPT_CHUNK, hidden.shape[1]),
        jnp.pad(following, (0, padding)).reshape(-1, PROMPT_CHUNK),
    )

    def one(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(chunk[0], context)
        logprob = _bits(logprob_of(logits, chunk[1]))
        return _stack([logprob, *_top_columns(logits, chunk[1], config)])

    out = jax.lax.map(one, chunks)
    return out.reshape(-1, out.shape[-1])[:num_tokens]


def _top_columns(logits: jax.Array, token: jax.Array, config: StepConfig) -> list[jax.Array]:
    top = sampling.top_logits(logits, token, config.max_logprobs)
    return [top.rank, top.ids, _bits(top.logprobs)]


def _split_top(columns: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return columns[:, 0], columns[:, 1 : 1 + count], _floats(columns[:, 1 + count :])


def _stack(columns: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([c if c.ndim == 2 else c[:, None] for c in columns], axis=1)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.float32)
