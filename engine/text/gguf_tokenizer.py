"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`).

Refuses other kinds and unknown pre-tokenisers by name: with a wrong one a model reads other tokens
than it was trained on, and nothing says so.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from octavo.configs.errors import LoadError
from octavo.engine.text.tokenizer import Tokenizer, add_around

# Token types of the format.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How text is cut before BPE.

    Attributes:
      pattern: matches are the words; None for GPT-2's own.
      digits: digits stand alone, cut before the words.
      nfc: text is brought to NFC first.
      whole_words: a word that is a token is not built from merges.
      add_bos: what a file without `add_bos_token` means.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = _Splitting()
_LLAMA3 = _Splitting(_LLAMA3_SPLIT, whole_words=True, add_bos=True)
_QWEN2 = _Splitting(_QWEN2_SPLIT, nfc=True)
SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Splitting(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of `metadata` (the `tokenizer.*` keys of a file).

    Raises:
      LoadError: a kind or pre-tokeniser that is not supported, or inconsistent entries.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        known = {"llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram"}.get(str(kind))
        name = f"{kind!r} ({known})" if known else repr(kind)
        raise LoadError(f"GGUF tokenizer kind {name} is not supported yet; supported: 'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise LoadError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(SPLITTINGS)}")
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    backend = _pipeline(tokens, _merges(metadata), SPLITTINGS[pre])
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            special = token_type == CONTROL
            backend.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special)])
    names = _special_tokens(metadata, tokens)
    _add_bos_and_eos(backend, metadata, names, SPLITTINGS[pre])
    return Tokenizer(backend, special_tokens=names, chat_templates=_chat_templates(metadata))


def _pipeline(tokens: list[str], merges: list[tuple[str, str]], splitting: _Splitting) -> tokenizers.Tokenizer:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if vocab.setdefault(token, i) != i:
            raise LoadError(f"tokenizer.ggml.tokens holds {token!r} twice")
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"the GGUF tokenizer's merges do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _array(metadata, "tokenizer.ggml.merges", str):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise LoadError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair")
        merges.append((left, right))
    return merges


def _array[T: (str, int)](metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    value = metadata.get(key)
    if value is None:
        raise LoadError(f"the GGUF file has no {key}")
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise LoadError(f"{key} must be an array of {'strings' if kind is str else 'integers'}")
    return value


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {}
    for name, key in _NAMES.items():
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if type(token_id) is not int:
            raise LoadError(f"{key} must be an integer, got {token_id!r}")
        if not 0 <= token_id < len(tokens):
            raise LoadError(f"{key} is {token_id}, outside of the {len(tokens)} tokens")
        names[name] = tokens[token_id]
    return names


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], names: dict[str, str], splitting: _Splitting
) -> None:
    bos = names.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", splitting.add_bos) else None
    eos = names.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    add_around(backend, bos, eos)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(f"{prefix}."):
            if not isinstance(value, str):
                raise LoadError(f"{key} must be a string")
            templates[key.removeprefix(prefix).lstrip(".") or "default"] = value
    return templates
