"""Ids to text while they come: what is given out never changes, and the pieces join to the text of all ids.

Refuses nothing: invalid UTF-8 becomes U+FFFD. What cannot be spelled yet is held back, at most
a few tokens of it, so a token costs constant time whatever a model writes.
"""

import abc
import codecs

from octavo.engine.text.tokenizer import REPLACEMENT, Tokenizer

MAX_HELD = 8


class Detokenizer(abc.ABC):
    """`"".join(push(…) for all ids) + flush()` is the text of all ids, however they are cut."""

    @abc.abstractmethod
    def push(self, ids: list[int]) -> str:
        """Takes the next ids; returns the text that is certain by now."""

    @abc.abstractmethod
    def flush(self) -> str:
        """The end: what is still held back, incomplete characters as U+FFFD."""


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after_text: bool = False
) -> Detokenizer:
    """The detokeniser for one output.

    Args:
      tokenizer: whose ids come.
      skip_special_tokens: leave special tokens out.
      after_text: the output continues a prompt, so a leading space is part of it (SentencePiece
        decoders drop it at the start of a text).
    """
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.is_byte_level:
        return _ByteLevelDetokenizer(tokenizer, skipped)
    return _PieceDetokenizer(tokenizer, skipped, after_text)


class _ByteLevelDetokenizer(Detokenizer):
    """Tokens are bytes; UTF-8 needs at most three of them held back."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: list[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes_of(i) for i in ids if i not in self._skipped]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceDetokenizer(Detokenizer):
    """For decoders that work on pieces (SentencePiece with byte tokens, and others).

    Bytes are held back while they may become a character, and then decoded together; everything
    else at once, as the continuation of the text before. (The one difference to decoding all ids at once: there,
    a run of byte tokens that is not UTF-8 as a whole becomes U+FFFD throughout, its good characters
    too. Here those were given out already, as they should be.)
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], after_text: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._after_text = after_text
        self._held: list[int] = []

    def push(self, ids: list[int]) -> str:
        text = ""
        for token_id in ids:
            if token_id not in self._skipped and self._tokenizer.has(token_id):
                self._held.append(token_id)
                text += self._take(final=False)
        return text

    def flush(self) -> str:
        return self._take(final=True) if self._held else ""

    def _take(self, final: bool) -> str:
        """The text of all held tokens, or nothing while it may still change."""
        byte_tokens = self._tokenizer.byte_tokens
        in_bytes = self._held[-1] in byte_tokens
        if in_bytes and not final and _is_start_of_character(bytes(byte_tokens[i] for i in self._held)):
            return ""
        if self._after_text:
            text = self._tokenizer.decode_after_text(self._held)
        else:
            text = self._tokenizer.decode(self._held, skip_special_tokens=False)
        if not (byte_tokens or final) and text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD:
            return ""
        self._held = []
        self._after_text = True
        return text


def _is_start_of_character(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
