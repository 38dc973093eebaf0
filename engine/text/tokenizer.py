"""One tokenizer for the text edge: text to ids, ids to text, and what single tokens spell.

Wraps a `tokenizers` pipeline; `hf_tokenizer.py` and `gguf_tokenizer.py` make one from files.
Refuses to clean up spaces or to guess: decoding is exactly what the pipeline's decoder says.
"""

import functools
import json

import tokenizers
from tokenizers import processors

from octavo.configs.errors import LoadError
from octavo.engine.errors import RequestError
from octavo.engine.text.control_tokens import ControlTokens

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A tokenizer.

    Args:
      backend: the pipeline: normaliser, pre-tokeniser, model, post-processor, decoder.
      special_tokens: what templates know by name (bos_token, eos_token, …) to the token's string.
      chat_templates: by name; "default" is the one that chats use.

    Attributes:
      vocab_size: one above the largest id, added tokens included.
      special_ids: ids that `skip_special_tokens` leaves out.
      is_byte_level: every token is a string of bytes and decoding joins them (GPT-2, Llama 3, Qwen).
      byte_tokens: the tokens <0x00> … <0xFF> of SentencePiece vocabularies, by id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        # A file may ask for cut or padded output; a prompt is neither.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size < 1:
            raise LoadError("the tokenizer has no tokens")
        self.is_byte_level = _decoder_kind(backend) == "ByteLevel"
        self.byte_tokens = {} if self.is_byte_level else _byte_tokens(backend)
        self._anchor_ids, self._anchor_text = self._find_anchor()
        # Bounded: clients may ask for any id.
        self.token_text = functools.lru_cache(maxsize=1 << 17)(self._token_text)
        self.token_bytes = functools.lru_cache(maxsize=1 << 18)(self._token_bytes)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for at most."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @functools.cached_property
    def control_tokens(self) -> ControlTokens:
        """What chats must not let users write."""
        return ControlTokens(self.backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; names of special tokens in it become those tokens.

        Args:
          text: any text that UTF-8 can hold.
          add_special_tokens: put BOS in front (and EOS behind) where the model wants it. Chat
            templates write these themselves.

        Raises:
          RequestError: not a string, or a lone surrogate in it.
        """
        check_text(text)
        # The batch call leaves out offsets, which makes it the fast one.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, ids without a token nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_after_text(self, ids: list[int]) -> str:
        """The text of `ids` where they follow other text: a leading space stays. Special tokens are kept."""
        return self.decode(self._anchor_ids + ids, skip_special_tokens=False)[len(self._anchor_text) :]

    def has(self, token_id: int) -> bool:
        """Whether the id has a token; logits are often wider than the vocabulary."""
        return self.backend.id_to_token(token_id) is not None

    def _token_text(self, token_id: int) -> str:
        """The token decoded alone, as it looks behind other text; U+FFFD for parts of characters."""
        return self.decode_after_text([token_id])

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds, also where they are only part of a character."""
        if token_id in self.byte_tokens:
            return bytes([self.byte_tokens[token_id]])
        if not self.is_byte_level:
            return self.token_text(token_id).encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_character()
        # The decoder takes a token that has a character outside of its alphabet literally.
        return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _find_anchor(self) -> tuple[list[int], str]:
        """A token that spells the same wherever it stands: text is decoded behind it."""
        for text in ("a", "A", "e", "0", ".", "-", "<"):
            token_id = self.backend.token_to_id(text)
            if token_id is not None and self.decode([token_id], skip_special_tokens=False) == text:
                return [token_id], text
        return [], ""


def check_text(text: object) -> None:
    """Refuses what is no text that UTF-8 can hold."""
    if not isinstance(text, str):
        raise RequestError(f"prompt must be a string or token ids, got {type(text).__name__}", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt holds a lone surrogate at character {error.start}", "prompt") from None


def add_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding put `bos` before and `eos` behind a text, where it is told to add special tokens."""
    around = [token for token in (bos, eos) if token is not None]
    if not around:
        backend.post_processor = None
        return
    sequence = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    backend.post_processor = processors.TemplateProcessing(single=sequence, special_tokens=ids)


def _decoder_kind(backend: tokenizers.Tokenizer) -> str | None:
    if backend.decoder is None:
        return None
    description = json.loads(backend.decoder.__getstate__())
    parts = description["decoders"] if description["type"] == "Sequence" else [description]
    return parts[0]["type"] if len(parts) == 1 else None


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


@functools.cache
def _byte_alphabet() -> tuple[str, ...]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


@functools.cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_byte_alphabet())}
