"""A tokenizer that spells any text: special tokens, the 256 bytes, then pieces of several bytes.

Writes tokenizer.json and tokenizer_config.json by hand, so it needs nothing but Python. The pieces can be decoded
but no merge makes them, so text is always encoded as bytes (pieces of scripted outputs are given by id).
"""

import json
import pathlib
from collections.abc import Sequence

SPECIAL_TOKENS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4}
FIRST_BYTE = len(SPECIAL_TOKENS)
FIRST_PIECE = FIRST_BYTE + 256
PIECES = (
    b"\n\n",
    b".\n",
    b"ObSer",
    b"vation: x",
    b"Observ",
    b"ation",
    b"Pari",
    b"s is",
    b" the",
    b"hello",
    b" world",
    b"\xf0\x9f",  # first half of an emoji
    b"\x99\x82",  # second half of U+1F642
    b"\xe6\x97",  # most of U+65E5
    b"\xa5\xe6\x9c\xac",  # its end, and U+672C
    b"\xc4\x8f",  # U+010F
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_ids(text: str | bytes) -> list[int]:
    """The ids that text is encoded as."""
    data = text.encode() if isinstance(text, str) else text
    return [FIRST_BYTE + byte for byte in data]


def piece_id(piece: bytes, pieces: Sequence[bytes] = PIECES) -> int:
    """The id of one of `pieces`."""
    return FIRST_PIECE + pieces.index(piece)


def token_bytes(token_id: int, pieces: Sequence[bytes] = PIECES) -> bytes:
    """What a token spells; special tokens spell their name, ids above the pieces " w" and their number."""
    if token_id < FIRST_BYTE:
        return list(SPECIAL_TOKENS)[token_id].encode()
    if token_id < FIRST_PIECE:
        return bytes([token_id - FIRST_BYTE])
    index = token_id - FIRST_PIECE
    return pieces[index] if index < len(pieces) else f" w{token_id}".encode()


def vocabulary(size: int, pieces: Sequence[bytes] = PIECES) -> list[str]:
    """How byte-level BPE writes each token, special ones as they are."""
    alphabet = _byte_alphabet()
    spelled = ("".join(alphabet[byte] for byte in token_bytes(i, pieces)) for i in range(FIRST_BYTE, size))
    return [*SPECIAL_TOKENS, *spelled]


def write_tokenizer(directory: pathlib.Path, size: int, pieces: Sequence[bytes] = PIECES) -> None:
    """Writes tokenizer.json and tokenizer_config.json with `size` tokens (at least the special ones and the bytes)."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for name, i in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(vocabulary(size, pieces))},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [""] * 256
    for byte in printable:
        alphabet[byte] = chr(byte)
    others = (byte for byte in range(256) if byte not in printable)
    for index, byte in enumerate(others):
        alphabet[byte] = chr(256 + index)
    return alphabet
