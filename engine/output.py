"""From a committed step's arrays to what a sequence gained: its tokens, why it ended, log-probabilities.

Memory is O(k) a token; nothing is as wide as the vocabulary.
"""

import math

from octavo.engine.plan import PromptLogprobs, SampledHost
from octavo.engine.request import FinishReason, Sequence, TopLogprobs


def append_tokens(seq: Sequence, new: list[int]) -> FinishReason | None:
    """Adds tokens up to the one that ends the sequence, and cuts `new` behind it. Why it ended, if it did."""
    ids, stop_ids, max_length = seq.token_ids, seq.stop_ids, seq.max_length
    for count, token in enumerate(new, 1):
        ids.append(token)
        if token in stop_ids and len(ids) > seq.min_length:
            del new[count:]
            return FinishReason.STOP
        if len(ids) >= max_length:
            del new[count:]
            return FinishReason.LENGTH
    return None


def stop_reason(seq: Sequence, token: int) -> int | None:
    """The stop token, when the user named it; None for the model's own EOS."""
    by_model = not seq.request.params.ignore_eos and token in seq.request.eos_token_ids
    return None if by_model else token


def token_logprobs(sampled: SampledHost, row: int, token_ids: list[int], num_top: int) -> list[TopLogprobs]:
    """One entry for each of the row's first `len(token_ids)` samples, with its `num_top` likeliest tokens."""
    if sampled.ranks is None or sampled.top_ids is None or sampled.top_logprobs is None:
        raise RuntimeError("the step was to give log-probabilities and did not")
    count, shape = len(token_ids), (sampled.logprobs.shape[1], sampled.top_ids.shape[-1])
    ranks = sampled.ranks[row].reshape(-1).tolist()
    top_ids = sampled.top_ids[row].reshape(shape)[:count, :num_top].tolist()
    top_logprobs = sampled.top_logprobs[row].reshape(shape)[:count, :num_top].tolist()
    chosen = sampled.logprobs[row].tolist()
    return [TopLogprobs(token, chosen[i], ranks[i], top_ids[i], top_logprobs[i]) for i, token in enumerate(token_ids)]


def gather_prompt_logprobs(seq: Sequence, arrays: PromptLogprobs, offset: int, start: int, stop: int) -> bool:
    """Files what the chunk of positions start … stop - 1, at `offset` on the flat axis, says of the tokens behind.

    False when a value is NaN.
    """
    entries, num_top = seq.prompt_logprobs, seq.request.params.prompt_logprobs
    count = min(stop, seq.prompt_len - 1) - start
    if entries is None or num_top is None or count <= 0:
        return True
    part = slice(offset, offset + count)
    columns = zip(
        seq.token_ids[start + 1 : start + 1 + count],
        arrays.logprob[part].tolist(),
        arrays.rank[part].tolist(),
        arrays.top_ids[part, :num_top].tolist(),
        arrays.top_logprobs[part, :num_top].tolist(),
        strict=True,
    )
    sound = True
    for position, (token, logprob, rank, top_ids, top_logprobs) in enumerate(columns, start + 1):
        entries[position] = TopLogprobs(token, logprob, rank, top_ids, top_logprobs)
        sound &= not math.isnan(logprob)
    return sound
