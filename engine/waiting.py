"""The waiting line: sequences by (priority, arrival, id), and beside it the siblings that wait for a prompt.

It only keeps order; whether the head may go in is the scheduler's affair.
"""

import heapq

from octavo.engine.request import Sequence, SequenceStatus

_SLACK = 64


class WaitingLine:
    """A heap in which finished (aborted) sequences stay until they come to the head or are too many."""

    __slots__ = ("_heap", "_siblings")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._siblings: dict[int, list[Sequence]] = {}

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """The first that still waits."""
        heap = self._heap
        while heap and heap[0][1].status is not SequenceStatus.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Takes the head out."""
        heapq.heappop(self._heap)

    def hold(self, first: Sequence, siblings: list[Sequence]) -> None:
        """Keeps the other samples of a request out of the line until its first one has dispatched the prompt."""
        self._siblings[first.seq_id] = siblings

    def release(self, first: Sequence) -> None:
        """Lets the siblings of `first`, if there are any, into the line with the prompt's block keys."""
        for seq in self._siblings.pop(first.seq_id, ()):
            if seq.status is SequenceStatus.WAITING:
                seq.block_keys = [keys.copy() for keys in first.block_keys]
                self.push(seq)

    def tidy(self, num_waiting: int) -> None:
        """Drops finished sequences once they are the larger part."""
        if len(self._heap) > 2 * num_waiting + _SLACK:
            self._heap = [item for item in self._heap if item[1].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)

    def members(self) -> list[Sequence]:
        """Everybody who waits, in no order; the held ones too."""
        held = [seq for siblings in self._siblings.values() for seq in siblings]
        return [seq for seq in [item[1] for item in self._heap] + held if seq.status is SequenceStatus.WAITING]
