"""A Plan: everything one launch needs, as plain values.

`launch(plan)` reads no other host state, no clock and no random source, so a
plan can be recorded, sent to another host and replayed to the same tokens.
"""

import dataclasses

import msgspec
import numpy as np


class SlotParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling settings of one slot, as the device wants them. 0 or empty means off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # 0 <= seed < 2**32
    min_length: int = 0  # prompt_len + min_tokens: stop ids are masked below it
    stop_ids: list[int] = []  # EOS (unless ignored) and stop_token_ids
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] | None = None  # needs a constrained row


class SlotLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Puts a sequence into a device slot: at admission, and again on resumption."""

    slot: int
    token_ids: list[int]  # prompt and output so far
    prompt_len: int
    num_computed: int  # prefix-cache hits start above 0
    block_ids: list[list[int]]  # per KV group
    params: SlotParams
    constrained_row: int = -1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Rows are sorted decode (one token) | prefill; columns run in parallel.

    Attributes:
      program: (T tokens, R rows, variant) of the compiled step to call.
      num_decode: rows 0 … num_decode - 1 have exactly one token.
      seq_ids: whose rows these are; commit looks them up, launch does not.
      slots, q_lens: per row, the device slot and the number of tokens.
      samples: per row, 1 when its last token's logits become a new token
        (the last prefill chunk and every decode row), else 0.
      edits: new blocks since the slot was loaded: (group, slot, index, block).
    """

    step: int
    program: tuple[int, int, str]
    num_decode: int
    seq_ids: list[int]
    slots: list[int]
    q_lens: list[int]
    samples: list[int]
    edits: list[tuple[int, int, int, int]]
    loads: list[SlotLoad]


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Over the step's flat token axis: entry t is about the token that follows token t in its row."""

    logprob: np.ndarray  # f32[T]
    rank: np.ndarray  # i32[T], 1 is the likeliest
    top_ids: np.ndarray  # i32[T, M]
    top_logprobs: np.ndarray  # f32[T, M]


@dataclasses.dataclass(frozen=True)
class SampledHost:
    """What one step gave, on the host. Rows are those of the plan; padded rows behind them mean nothing.

    With k drafts a row, `ranks` may have a second axis 1 + k, and the top arrays one before M.
    """

    tokens: np.ndarray  # i32[R, 1 + k]
    num_accepted: np.ndarray  # i32[R], how many of a row's tokens count
    finite: np.ndarray  # bool[R], False where a logit was NaN or infinite
    logprobs: np.ndarray  # f32[R, 1 + k], of the tokens
    ranks: np.ndarray | None = None  # i32[R]
    top_ids: np.ndarray | None = None  # i32[R, M]
    top_logprobs: np.ndarray | None = None  # f32[R, M]
    prompt_logprobs: PromptLogprobs | None = None
