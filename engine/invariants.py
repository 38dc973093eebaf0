"""What must hold of the scheduler's sequences between any two of its calls; raises RuntimeError where it does not."""

import itertools
from collections.abc import Iterable

from octavo.engine.request import Sequence, SequenceStatus


def check_sequences(running: list[Sequence], waiting: list[Sequence], live: Iterable[int]) -> None:
    """Everybody alive runs or waits, once; who runs is in order and adds up; who waits holds nothing."""
    if sorted(seq.seq_id for seq in [*running, *waiting]) != sorted(live):
        raise RuntimeError("every live sequence must run or wait, once")
    if any(before.order > after.order for before, after in itertools.pairwise(running)):
        raise RuntimeError("running sequences are out of order")
    for seq in running:
        _check_running(seq)
    for seq in waiting:
        if seq.slot >= 0 or seq.constrained_row >= 0 or any(seq.block_ids) or seq.num_computed or seq.filling:
            raise RuntimeError(f"sequence {seq.seq_id} waits and holds something")


def check_partition(what: str, free: list[int], held: list[int], count: int) -> None:
    """Each of 0 … count - 1 is free or held, once."""
    if sorted([*free, *held]) != list(range(count)):
        raise RuntimeError(f"a {what} was lost, or given out twice: {free} free, {held} held")


def _check_running(seq: Sequence) -> None:
    if seq.status is not SequenceStatus.RUNNING:
        raise RuntimeError(f"sequence {seq.seq_id} runs as {seq.status}")
    if seq.num_tokens != len(seq.token_ids) + seq.num_pending or seq.num_tokens > seq.max_length:
        raise RuntimeError(f"sequence {seq.seq_id} is {seq.num_tokens} long, limit {seq.max_length}")
    if not seq.num_computed <= seq.capacity or not seq.num_computed < seq.num_tokens:
        raise RuntimeError(f"sequence {seq.seq_id}: {seq.num_computed} computed of {seq.num_tokens}")
    if not seq.filling and seq.num_computed != seq.num_tokens - 1:
        raise RuntimeError(f"sequence {seq.seq_id} decodes and lacks more than a token")
