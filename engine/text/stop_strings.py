"""Finds stop strings in text that comes in pieces, and never gives out a character that one may still claim.

The result does not depend on how the text is cut: the match that ends first wins, and of those
that end together the one that starts first.
"""


class StopStrings:
    """The stop strings of one output.

    Args:
      stops: what to look for; the list may be empty, no string in it is.
      include: a matched string stays in the text.
    """

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next text.

        Args:
          text: what was decoded since the last call.
          may_stop: whether a match that ends in `text` counts.

        Returns:
          The text that is certain by now, and the stop string that was found, if one was: the text
          then ends before it (or with it) and nothing may follow.
        """
        if not self._stops or not text:
            return text, None
        known = len(self._held)  # no match that counts ends here: it would have been found before
        self._held += text
        match = self._find(known) if may_stop else None
        if match is not None:
            end, start, stop = match
            released = self._held[: end if self._include else start]
            self._held = ""
            return released, stop
        keep = self._longest_start_of_a_stop()
        split = len(self._held) - keep
        released, self._held = self._held[:split], self._held[split:]
        return released, None

    def flush(self) -> str:
        """The end: what was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, known: int) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, known + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _longest_start_of_a_stop(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        longest = 0
        last = self._held[-1]
        for stop in self._stops:
            length = min(len(stop) - 1, len(self._held))
            # Only where the stop string has the last character: nearly nowhere, and found by a fast search.
            while (length := stop.rfind(last, 0, length) + 1) > longest:
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
                length -= 1
        return longest
