"""What a caller may pass as a prompt, brought to one form: token ids, and the text where there was one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import RequestError
from octavo.engine.request import MAX_BAD_WORD_LEN
from octavo.engine.text.tokenizer import Tokenizer

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})

type PromptInput = str | list[int] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it.

    Attributes:
      text: None where ids were given.
      token_ids: checked for range and length by the engine core.
      cache_salt: keeps its blocks in the prefix cache apart.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def split_prompts(prompts: object) -> list[object]:
    """One prompt or several, as a list. A list that starts with a number is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}", "prompt")
    if not prompts:
        raise RequestError("prompts must not be empty", "prompt")
    return [prompts] if isinstance(prompts[0], int | float) else list(prompts)


def parse_prompt(prompt: object, tokenizer: Tokenizer | None, max_tokens: int | None = None) -> Prompt:
    """Reads one prompt: text, ids, or a mapping with `prompt` or `prompt_token_ids`, and maybe `cache_salt`.

    Args:
      prompt: as a caller gives it.
      tokenizer: None where there is none.
      max_tokens: of the model; text that cannot fit is refused before it is encoded.

    Raises:
      RequestError: nothing of that, or text without a tokenizer, or far too much of it.
    """
    salt = None
    if isinstance(prompt, Mapping):
        if unknown := sorted(set(map(str, prompt)) - _KEYS):
            raise RequestError(
                f"a prompt has the unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}", "prompt"
            )
        given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
        if len(given) != 1:
            raise RequestError("a prompt must have exactly one of prompt and prompt_token_ids", "prompt")
        salt = prompt.get("cache_salt")
        prompt = prompt[given[0]]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids", "prompt")
        check_length(prompt, tokenizer, max_tokens)
        return Prompt(prompt, tokenizer.encode(prompt), salt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt must be text or token ids, got {type(prompt).__name__}", "prompt")
    return Prompt(None, list(prompt), salt)


def check_length(text: str, tokenizer: Tokenizer, max_tokens: int | None) -> None:
    """Refuses text of more characters than `max_tokens` of the longest token have, in no time.

    (A normaliser that drops characters could make such a text fit. No real text comes near.)
    """
    if max_tokens is None:
        return
    limit = max_tokens * tokenizer.longest_token
    if len(text) > limit:
        raise RequestError(
            f"the prompt has {len(text)} characters; the model's limit of {max_tokens} tokens is at most {limit}"
            f" characters, since the longest token has {tokenizer.longest_token}",
            "prompt",
        )


def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """The token sequences that spell the words, at the start of a text and behind a space.

    Raises:
      RequestError: a word has no tokens, or more characters than the tokens that it may have.
    """
    sequences: list[list[int]] = []
    limit = MAX_BAD_WORD_LEN * tokenizer.longest_token
    for word in words:
        if len(word) > limit:  # before it is encoded, which could take long
            raise RequestError(f"a bad word has {len(word)} characters, at most {limit}", "bad_words")
        if word.strip(" "):
            bare = tokenizer.encode(word.removeprefix(" "), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.removeprefix(" "), add_special_tokens=False)
        else:  # only spaces: these as they are
            bare = spaced = tokenizer.encode(word, add_special_tokens=False)
        if not bare:
            raise RequestError(f"bad_words: {word[:80]!r} has no tokens in this model's vocabulary", "bad_words")
        # A space that is a token of its own ends before the word: the bare sequence finds that.
        with_space = len(spaced) == len(bare) and spaced[:1] != bare[:1]
        sequences += [bare, spaced] if with_space else [bare]
    return sequences
