"""Draft: a plan in the making. It collects rows, blocks and loads; who gets them is the scheduler's affair."""

import msgspec

from octavo.engine.buckets import VARIANTS, Ladder
from octavo.engine.plan import Plan, SlotLoad
from octavo.engine.request import Sequence


class Chunk(msgspec.Struct):
    """A planned piece of a prompt whose commit has more to do than to take a token."""

    seq: Sequence
    start: int  # positions start … stop - 1
    stop: int
    row: int  # among the prefill rows
    offset: int = 0  # of its first token on the flat axis, once all rows are known


class Draft:
    """What one call of `Scheduler.plan` has decided so far.

    Attributes:
      decode_ids, decode_slots: of the rows with one token and a sample.
      prefill: seq_id, slot, q_len, samples of the others.
      num_tokens: in all rows.
      level: index into VARIANTS of what the rows need.
      filling: running sequences with known tokens left to compute.
      filled: those that got some of them here.
      now: when it is made, in seconds.
    """

    __slots__ = (
        "chunks", "decode_ids", "decode_slots", "edits", "filled", "filling", "level", "loads", "now",
        "num_tokens", "prefill",
    )  # fmt: skip

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.decode_ids: list[int] = []
        self.decode_slots: list[int] = []
        self.prefill: list[tuple[int, int, int, int]] = []
        self.num_tokens = 0
        self.level = 0
        self.edits: list[tuple[int, int, int, int]] = []
        self.loads: list[SlotLoad] = []
        self.filling: list[Sequence] = []
        self.filled: list[Sequence] = []
        self.chunks: list[Chunk] = []

    def to_plan(self, step: int, ladder: Ladder) -> Plan:
        """Decode rows first, then the others; also tells every chunk where it lies on the flat axis."""
        num_decode, prefill = len(self.decode_ids), self.prefill
        for chunk in self.chunks:
            chunk.offset = num_decode + sum(row[2] for row in prefill[: chunk.row])
        return Plan(
            step=step,
            program=ladder.choose(num_decode + len(prefill), self.num_tokens, num_decode, VARIANTS[self.level]),
            num_decode=num_decode,
            seq_ids=self.decode_ids + [row[0] for row in prefill],
            slots=self.decode_slots + [row[1] for row in prefill],
            q_lens=[1] * num_decode + [row[2] for row in prefill],
            samples=[1] * num_decode + [row[3] for row in prefill],
            edits=self.edits,
            loads=self.loads,
        )
