"""Keeps what users write from becoming control tokens: in a chat, only the template writes these.

Control tokens are those that the tokenizer flags as special. Added tokens without the flag (often <think> or
<tool_call>) stay what they are, since templates look for them in messages. Refuses text whose spelling would
come out as a control token all the same. Not found is a name that the template itself puts together from pieces.
"""

import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers

from octavo.engine.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)


class ControlTokens:
    """The control tokens of a tokenizer, and how text is encoded that holds their names as text.

    Args:
      backend: the tokenizer's pipeline.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._tokens = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        names = [token.content for token in self._tokens.values() if token.content]
        self._pattern = re.compile(_one_of(names)) if names else None

    def hide(self, values: Any, source: str) -> "HiddenNames":
        """Finds the names of control tokens in all that a caller wrote.

        Args:
          values: lists and mappings of texts; anything else in them is passed over.
          source: the template.
        """
        texts = list(_texts(values))
        names = {name for text in texts for name in self._pattern.findall(text)} if self._pattern else set()
        return HiddenNames(sorted(names), "\n".join([source, *texts]) if names else "")

    def encode(self, text: str, hidden: "HiddenNames") -> list[int]:
        """The ids of a rendered chat.

        Args:
          text: with marks for the names that are text.
          hidden: these marks.

        Raises:
          RequestError: a name becomes its token even as text.
        """
        backend, stand_ins, ids_of = self._plain
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: stand_ins[match[0]], text)
        ids = backend.encode_batch_fast([hidden.show(text)], add_special_tokens=False)[0].ids
        for token_id in ids:
            token = self._tokens.get(token_id)
            if token is not None and token.content in hidden.names:
                raise RequestError(
                    f"messages hold {token.content!r}, a control token of this model even when it is text", "messages"
                )
        return [ids_of.get(token_id, token_id) for token_id in ids]

    @functools.cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """A copy that reads names as text, by name what stands for a control token in it, and the ids of these.

        Made once needed, since it takes as much memory as the tokenizer. Nobody can guess a stand-in.
        """
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        key = secrets.token_hex(16)
        stand_ins = {token.content: f"\U00100000{key}.{i}\U00100000" for i, token in self._tokens.items()}
        copy.add_tokens(
            [
                tokenizers.AddedToken(
                    stand_ins[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                for token in self._tokens.values()
            ]
        )
        added = copy.get_added_tokens_decoder()
        id_of = {stand_ins[token.content]: i for i, token in self._tokens.items()}
        return copy, stand_ins, {i: id_of[token.content] for i, token in added.items() if token.content in id_of}


class HiddenNames:
    """Names of control tokens, each with a mark that takes its place while the template runs.

    A mark is one private-use character: a template cannot cut it, trim it or change its case.

    Args:
      names: what to hide.
      used: text that no mark may occur in.
    """

    def __init__(self, names: list[str], used: str) -> None:
        free = (chr(c) for c in _PRIVATE_USE if chr(c) not in used and _escaped(chr(c)) not in used)
        self._mark_of = dict(zip(names, free, strict=False))
        if len(self._mark_of) < len(names):
            raise RequestError(f"messages hold {len(names)} control tokens of this model, too many", "messages")
        self.names = frozenset(names)
        self._hide = re.compile(_one_of(names)) if names else None

    def hide(self, value: Any) -> Any:
        """`value` with marks for names, in nested lists and mappings too."""
        if self._hide is None:
            return value
        if isinstance(value, str):
            return self._hide.sub(lambda match: self._mark_of[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(inner) for inner in value]
        return value

    def show(self, text: str) -> str:
        """`text` with names for marks, those too that became JSON escapes."""
        for name, mark in self._mark_of.items():
            text = text.replace(mark, name).replace(_escaped(mark), name)
        return text


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            stack += item


def _one_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of `words`; common starts are written once, so a search takes one pass."""
    words = list(words)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(words), max(words), strict=False))
    start = "".join(character for character, _ in same)
    branches: dict[str, list[str]] = {}
    for word in words:
        if rest := word[len(start) :]:
            branches.setdefault(rest[0], []).append(rest)
    if not branches:
        return re.escape(start)
    may_end = "?" if start in words else ""
    return f"{re.escape(start)}(?:{'|'.join(map(_one_of, branches.values()))}){may_end}"
