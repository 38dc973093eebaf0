"""A tokenizer as Llama 2 and Mistral have it: SentencePiece pieces with ▁ for spaces, and byte tokens for the rest."""

import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.engine.text.tokenizer import Tokenizer, add_around

SPECIAL = ("<unk>", "<s>", "</s>")
FIRST_BYTE = len(SPECIAL)
PIECES = (
    "▁",
    "▁▁",
    "▁the",
    "▁leading",
    "a",
    "b",
    "e",
    "h",
    "l",
    "o",
    "t",
    "he",
    "el",
    "lo",
    ".",
    "日",
    "本",
    "▁日",
    "é",
)
FIRST_PIECE = FIRST_BYTE + 256


def piece_id(piece: str) -> int:
    """The id of one of `PIECES`."""
    return FIRST_PIECE + PIECES.index(piece)


def byte_ids(data: bytes) -> list[int]:
    """The byte tokens that spell `data`."""
    return [FIRST_BYTE + byte for byte in data]


def make_piece_tokenizer() -> Tokenizer:
    """The tokenizer, with BOS in front of prompts."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("h", "e"), ("e", "l"), ("l", "o")],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    add_around(backend, "<s>", None)
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
