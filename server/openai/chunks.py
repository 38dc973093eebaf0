"""The bytes of a streamed answer: everything that is the same in all chunks of a choice is encoded once.

A plain piece of text costs one JSON string and two joins. Both routes use it; the choices are theirs.
"""

import msgspec

from octavo.server.openai.generation import Tally
from octavo.server.openai.requests import GenerationRequest
from octavo.server.openai.service import Stamp

encode = msgspec.json.encode


class ChunkFrame:
    """What surrounds the choice in every chunk of one stream.

    Args:
      kind: the chunk's `object`.
      stamp: of the answer.
      request: for its stream_options.
      tally: the usage so far.
    """

    def __init__(self, kind: str, stamp: Stamp, request: GenerationRequest, tally: Tally) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._tally = tally
        head = {
            "id": stamp.id,
            "object": kind,
            "created": stamp.created,
            "model": stamp.model,
            "system_fingerprint": stamp.fingerprint,
        }
        self.opening = b"data: " + encode(head)[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    @property
    def closing(self) -> bytes:
        """What follows the choice."""
        return b"]" + self._usage() if self._continuous else self._closing

    def wrap(self, choice: bytes, more: bytes = b"") -> bytes:
        """A whole event; `more` are further members of the chunk."""
        closing = self.closing
        return self.opening + choice + (b"]" + more + closing[1:] if more else closing)

    def last(self) -> bytes:
        """The chunk without choices that carries the usage, where it was asked for."""
        return self.opening + b"]" + self._usage() if self._include_usage else b""

    def _usage(self) -> bytes:
        return b',"usage":' + encode(self._tally.usage) + b"}\n\n"
