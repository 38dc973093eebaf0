"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece (`llama`).

Refuses other kinds and unknown pre-tokenisers by name: with a wrong one a model reads other tokens
than it was trained on, and nothing says so.
"""

import dataclasses
import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from octavo.configs.errors import LoadError
from octavo.engine.text.gguf_pieces import piece_pipeline
from octavo.engine.text.gguf_splitting import Splitting, find_splitting
from octavo.engine.text.tokenizer import Tokenizer, add_around

logger = logging.getLogger(__name__)

# Token types of the format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_OTHER_KINDS = {
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV's greedy pieces",
    "plamo2": "PLaMo 2",
    "gemma4": "BPE over pieces",
    "hybriddna": "DNA",
    "whitespace": "words",
    "no_vocab": "no tokenizer",
    "none": "no tokenizer",
}
_NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # of files that do not say


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, by id.

    Attributes:
      tokens: all different, none empty.
      types: one of the types above for each.
      ids: of each token.
    """

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of `metadata` (the `tokenizer.*` keys of a file).

    Raises:
      LoadError: a kind or pre-tokeniser that is not supported, or inconsistent entries.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        known = _OTHER_KINDS.get(kind) if isinstance(kind, str) else None
        name = f"{kind!r} ({known})" if known else reprlib.repr(kind)
        raise LoadError(
            f"GGUF tokenizer kind {name} is not supported; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    vocabulary = _vocabulary(metadata)
    if kind == "gpt2":
        splitting = _splitting(metadata)
        names = _special_tokens(metadata, vocabulary.tokens, {})
        backend = _byte_pipeline(vocabulary, _merges(metadata), splitting)
        add_bos = splitting.add_bos
    else:
        names = _special_tokens(metadata, vocabulary.tokens, _SENTENCEPIECE_IDS)
        backend = _piece_pipeline(metadata, vocabulary, names)
        add_bos = True
    _add_tokens(backend, vocabulary)
    bos = names.get("bos_token") if _flag(metadata, "add_bos_token", add_bos) else None
    eos = names.get("eos_token") if _flag(metadata, "add_eos_token", False) else None
    add_around(backend, bos, eos)
    return Tokenizer(backend, special_tokens=names, chat_templates=_chat_templates(metadata))


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    # llama.cpp gives tokens without a text the same names.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_array(metadata, "tokenizer.ggml.tokens", str))]
    if not tokens:
        raise LoadError("tokenizer.ggml.tokens is empty")
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if ids.setdefault(token, i) != i:
            raise LoadError(f"tokenizer.ggml.tokens holds {reprlib.repr(token)} twice")
    return _Vocabulary(tokens, types, ids)


def _splitting(metadata: Mapping[str, Any]) -> Splitting:
    if "tokenizer.ggml.pre" not in metadata:
        logger.warning("the GGUF file does not name its pre-tokeniser (tokenizer.ggml.pre): its tokens may be wrong")
    return find_splitting(metadata.get("tokenizer.ggml.pre", "default"))


def _byte_pipeline(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], splitting: Splitting
) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"the GGUF tokenizer's merges do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in splitting.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _piece_pipeline(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, names: Mapping[str, str]
) -> tokenizers.Tokenizer:
    scores = _array(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise LoadError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    mergeable = [
        token
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token_type in (NORMAL, USER_DEFINED, UNUSED)
    ]
    space_prefix = _flag(metadata, "add_space_prefix", True)
    return piece_pipeline(vocabulary.ids, mergeable, scores, names["unk_token"], space_prefix)


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in text before it is cut; all at once, since each call rebuilds the search."""
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=token_type != USER_DEFINED)
            for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token_type in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}  # of two equal ones the first counts
    for merge in _array(metadata, "tokenizer.ggml.merges", str):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise LoadError(f"tokenizer.ggml.merges holds {reprlib.repr(merge)}, which is not a pair")
        merges[left, right] = None
    return list(merges)


def _array[T: (str, int, float)](metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    value = metadata.get(key)
    if value is None:
        raise LoadError(f"the GGUF file has no {key}")
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        kinds = {str: "strings", int: "integers", float: "floats"}
        raise LoadError(f"{key} must be an array of {kinds[kind]}")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise LoadError(f"tokenizer.ggml.{name} must be true or false, got {reprlib.repr(value)}")
    return value


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str], defaults: Mapping[str, int]) -> dict[str, str]:
    names = {}
    for name, key in _NAMES.items():
        token_id = metadata.get(key, defaults.get(name))
        if token_id is None:
            continue
        if type(token_id) is not int:
            raise LoadError(f"{key} must be an integer, got {reprlib.repr(token_id)}")
        if not 0 <= token_id < len(tokens):
            raise LoadError(f"{key} is {token_id}, outside of the {len(tokens)} tokens")
        names[name] = tokens[token_id]
    return names


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(f"{prefix}."):
            if not isinstance(value, str):
                raise LoadError(f"{key} must be a string")
            templates[key.removeprefix(prefix).lstrip(".") or "default"] = value
    return templates
