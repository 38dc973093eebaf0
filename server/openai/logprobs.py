"""Log-probabilities in OpenAI's two schemas and in vLLM's for prompts.

A token is shown decoded alone, as it looks behind other text; where that is only a part of a character, chats carry
its exact bytes. Minus infinity becomes -9999, since JSON has no word for it. Values are raw: of the
model's own distribution, before penalties and temperature.
"""

import codecs
from collections.abc import Sequence

from octavo.engine.text.output import Logprob, LogprobTable
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)


class TokenNames:
    """How tokens are shown.

    Args:
      tokenizer: None for a model without one.
      as_ids: show `token_id:N` instead of text.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int, entry: Logprob | None = None) -> str:
        """The token's name; `entry` may hold it already."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        """What the token adds to the text, exactly."""
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def likeliest(table: LogprobTable, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens of a position. (The table also has the chosen one, whatever its rank.)"""
    return sorted(table.items(), key=lambda item: -item[1].finite)[:count]


def chat_logprobs(
    token_ids: Sequence[int], tables: Sequence[LogprobTable], names: TokenNames, count: int
) -> list[TokenLogprob]:
    """One entry a token, each with the `count` likeliest."""
    return [
        TokenLogprob(
            names.text(token_id, table[token_id]),
            table[token_id].finite,
            names.bytes(token_id),
            [TopLogprob(names.text(i, top), top.finite, names.bytes(i)) for i, top in likeliest(table, count)],
        )
        for token_id, table in zip(token_ids, tables, strict=True)
    ]


def whole_chat_logprobs(
    token_ids: Sequence[int], tables: Sequence[LogprobTable] | None, names: TokenNames, count: int | None
) -> ChatLogprobs | None:
    """None where none were asked for."""
    if count is None or tables is None:
        return None
    return ChatLogprobs(chat_logprobs(token_ids, tables, names, count))


class CompletionTokens:
    """Log-probabilities of one completion in the older schema, whole or piece by piece, with places in its text.

    Args:
      tokenizer: None for a model without one; places are 0 then.
      names: how tokens are shown.
      skipped: ids that the text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer | None, names: TokenNames, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], tables: Sequence[LogprobTable | None], text: str, count: int
    ) -> CompletionLogprobs:
        """The entries of an echoed prompt, whose text is known; what follows begins behind it."""
        entries = self.take(token_ids, tables, count)
        # Special tokens in front, or spaces that the decoder drops, can make the sum of tokens longer.
        entries = CompletionLogprobs(
            entries.tokens,
            entries.token_logprobs,
            entries.top_logprobs,
            [min(offset, len(text)) for offset in entries.text_offset],
        )
        self._decoder.reset()
        self._offset = len(text)
        return entries

    def take(self, token_ids: Sequence[int], tables: Sequence[LogprobTable | None], count: int) -> CompletionLogprobs:
        """The next tokens' entries: the `count` likeliest of each, and always its own."""
        names, texts, chosen, tops, offsets = self._names, [], [], [], []
        for token_id, table in zip(token_ids, tables, strict=True):
            entry = None if table is None else table[token_id]
            texts.append(names.text(token_id, entry))
            chosen.append(None if entry is None else entry.finite)
            tops.append(None if table is None or entry is None else self._top(token_id, entry, table, count))
            offsets.append(self._offset)
            self._advance(token_id)
        return CompletionLogprobs(texts, chosen, tops, offsets)

    def _top(self, token_id: int, entry: Logprob, table: LogprobTable, count: int) -> dict[str, float]:
        top = {self._names.text(token_id, entry): entry.finite}
        for other, logprob in likeliest(table, count):
            top.setdefault(self._names.text(other, logprob), logprob.finite)
        return top

    def _advance(self, token_id: int) -> None:
        if self._tokenizer is not None and token_id not in self._skipped:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The entries of two, one behind the other."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(tables: Sequence[LogprobTable | None] | None) -> PromptLogprobs | None:
    """vLLM's form: token ids, as strings, to their entries; null for the first token."""
    if tables is None:
        return None
    return [
        None if table is None else {str(i): PromptLogprob(e.finite, e.rank, e.decoded_token) for i, e in table.items()}
        for table in tables
    ]
