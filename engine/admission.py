"""What a request must satisfy before it may wait, and what it tells the device. Every refusal names field and limit."""

from typing import Self

import msgspec

from octavo.configs.scheduler import SchedulerConfig
from octavo.engine.buckets import FULL, LOGPROBS, PLAIN, VARIANTS
from octavo.engine.checks import shown
from octavo.engine.errors import RequestError
from octavo.engine.kv_groups import KVGroups
from octavo.engine.plan import SlotParams
from octavo.engine.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, Request, Sequence


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are checked against: plain numbers, so that another process can check by itself.

    Attributes:
      max_model_len: tokens of prompt and output together.
      vocab_size: V, the width of the logits.
      sampled_vocab_size: ids from here up are never drawn.
      max_logprobs: the most top log-probabilities a request may ask for.
      max_constrained_rows: requests with penalties or allowed ids that run at once.
      block_sizes: per KV group, tokens in one block.
      usable_blocks: per KV group, the blocks of an empty pool.
    """

    max_model_len: int
    vocab_size: int
    sampled_vocab_size: int
    max_logprobs: int
    max_constrained_rows: int
    block_sizes: tuple[int, ...]
    usable_blocks: tuple[int, ...]

    @classmethod
    def of(cls, config: SchedulerConfig, groups: KVGroups) -> Self:
        return cls(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            sampled_vocab_size=config.sampled_vocab_size or config.vocab_size,
            max_logprobs=config.max_logprobs,
            max_constrained_rows=config.max_constrained_rows,
            block_sizes=groups.block_sizes,
            usable_blocks=tuple(pool.num_usable for pool in groups.pools),
        )


def check_request(request: Request, limits: RequestLimits) -> None:
    """Raises RequestError if an engine with these limits can never serve the request."""
    _check_ids("prompt", request.prompt_token_ids, limits.vocab_size)
    if not request.prompt_token_ids:
        raise RequestError("prompt must hold at least one token", "prompt")
    _check_lengths(request, limits)
    params = request.params
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > limits.max_logprobs:
            raise RequestError(f"{name} must be at most {limits.max_logprobs}, got {wanted}", name)
    _check_ids("stop_token_ids", params.stop_token_ids or [], limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or [], limits.vocab_size)
    _check_ids("logit_bias", list(params.logit_bias or ()), limits.vocab_size)
    _check_bad_words(request.bad_words_token_ids, limits.vocab_size)
    stop_ids = stop_token_ids(request, limits.vocab_size)
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids and EOS are {len(stop_ids)} ids, at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids"
        )
    if params.needs_constrained_row and limits.max_constrained_rows == 0:
        raise RequestError("this engine has no room for penalties or allowed_token_ids (max_constrained_rows is 0)")
    _check_support(request, stop_ids, limits.sampled_vocab_size)


def stop_token_ids(request: Request, vocab_size: int) -> frozenset[int]:
    """EOS unless ignored, and the user's own; EOS ids that the logits do not reach are left out."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return frozenset(t for t in (*eos, *(request.params.stop_token_ids or ())) if 0 <= t < vocab_size)


def level_of(request: Request, cuts_are_plain: bool) -> int:
    """Index into VARIANTS of what its sampling rows need."""
    if request.params.logprobs is not None:
        return VARIANTS.index(LOGPROBS)
    params = request.params
    full = params.changes_logits or bool(request.bad_words_token_ids) or (params.cuts_tail and not cuts_are_plain)
    return VARIANTS.index(FULL if full else PLAIN)


def slot_params(seq: Sequence, vocab_size: int) -> SlotParams:
    """The request's settings as the device wants them."""
    request, params = seq.request, seq.request.params
    return SlotParams(
        temperature=float(params.temperature),
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        seed=seq.seed,
        min_length=seq.min_length,
        stop_ids=sorted(seq.stop_ids),
        logit_bias=params.logit_bias or {},
        bad_words=request.bad_words_token_ids,
        allowed_token_ids=params.allowed_token_ids,
    )


def _check_ids(field: str, ids: list[int], vocab_size: int) -> None:
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        wrong = next(t for t in ids if type(t) is not int)
        raise RequestError(f"{field} must hold integer token ids, got {shown(wrong)}", field)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"{field} holds the token id {shown(wrong)}, outside of the vocabulary 0 … {vocab_size - 1}", field
        )


def _check_lengths(request: Request, limits: RequestLimits) -> None:
    prompt_len, max_tokens = len(request.prompt_token_ids), request.params.max_tokens or 0
    if prompt_len + max_tokens > limits.max_model_len:
        raise RequestError(
            f"a prompt of {prompt_len} tokens and max_tokens {max_tokens} are {prompt_len + max_tokens} tokens, "
            f"the limit (max_model_len) is {limits.max_model_len}",
            "prompt" if prompt_len > limits.max_model_len else "max_tokens",
        )
    length = prompt_len + max(max_tokens - 1, 0)  # the last token's KV is never needed
    for size, usable in zip(limits.block_sizes, limits.usable_blocks, strict=True):
        needed = -(-length // size)
        if needed > usable:
            raise RequestError(
                f"a prompt of {prompt_len} tokens and max_tokens {max_tokens} need {needed} blocks of {size} tokens, "
                f"the pool has {usable}",
                "max_tokens",
            )


def _check_bad_words(bad_words: list[list[int]], vocab_size: int) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words are {len(bad_words)} token sequences, at most {MAX_BAD_WORDS}", "bad_words")
    for word in bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_LEN:
            raise RequestError(f"a bad word has {len(word)} tokens, between 1 and {MAX_BAD_WORD_LEN}", "bad_words")
        _check_ids("bad_words", word, vocab_size)


def _check_support(request: Request, stop_ids: frozenset[int], sampled_vocab_size: int) -> None:
    """Refuses masks that plainly leave nothing to sample. (Longer bad words may still mask the rest at some step.)"""
    masked = {word[0] for word in request.bad_words_token_ids if len(word) == 1}
    if request.params.min_tokens > 0:
        masked |= stop_ids
    allowed = request.params.allowed_token_ids
    if allowed is not None and min(allowed) >= sampled_vocab_size:
        raise RequestError(
            f"allowed_token_ids holds only ids without a string: the tokenizer ends at {sampled_vocab_size - 1}",
            "allowed_token_ids",
        )
    left = range(sampled_vocab_size) if allowed is None else {t for t in allowed if t < sampled_vocab_size}
    if len(masked) >= len(left) and masked.issuperset(left):
        raise RequestError(
            "bad_words (and stop ids, below min_tokens) mask every token that may be sampled",
            "bad_words" if allowed is None else "allowed_token_ids",
        )
