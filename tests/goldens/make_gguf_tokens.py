"""Makes gguf_tokens.json: what llama.cpp makes of hard texts, by each pre-tokeniser and by pieces.

Run from the repository's root: python -m tests.goldens.make_gguf_tokens LLAMA_TOKENIZE, with a build of llama.cpp's
tool llama-tokenize. The vocabularies are trained on the texts across word boundaries, so that a wrong cut shows.
"""

import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.references.gguf_files import write_gguf

GOLDEN = pathlib.Path(__file__).with_name("gguf_tokens.json")
NUM_TEXTS = 24
PARTS = [
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "a",
        "B",
        "Zz",
        "é",
        "e\u0301",
        "日本",
        "の",
        "한국",
        "🙂",
        "👩‍👧",
        "1",
        "12",
        "1234567",
    ),
    *(
        "٣",
        "½",
        "'s",
        "'LL",
        "don't",
        "_",
        "__init__",
        "(x)",
        "+=",
        "!!!",
        "...",
        "—",
        "“",
        "\u00a0",
        "\u2003",
        "\u200b",
    ),
    *(
        "ß",
        "Я",
        "привет",
        "नमस्ते",
        "ไทย",
        "עברית",
        "/",
        "\\",
        "$",
        "<",
        "|",
        "`",
        "^",
        "~",
        "\ufeff",
        "ﬁ",
        "𝒳",
        "\u2028",
    ),
    *("=====", "#", "@x", "    return", "{\n\t}", ";\n\n\n", "HTTPServer", "l'été", "。", "，"),
]
# One name of each way to cut. Left out is where llama.cpp approximates: it takes letters beyond ASCII for both cases.
NAMES = (
    *("default", "llama-bpe", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder", "deepseek-v3", "spark2_5", "gpt-2"),
    *("smollm", "command-r", "falcon", "dbrx", "minicpm5", "jais-2", "bailingmoe", "seed-coder", "ufakzeka", "laguna"),
    *("exaone-moe", "bloom", "viking"),
)
# There, too: it takes no white space beyond ASCII for a part of DeepSeek's ranges, and digits together.
LEFT_OUT = {"deepseek-llm": r"\d\d|[^\x00-\x7f\S]", "deepseek-coder": r"[^\x00-\x7f\S]"}


def texts() -> Iterator[str]:
    """Texts in NFC, since some tokenizers normalise and llama.cpp does not."""
    chosen = random.Random(0)
    for _ in range(NUM_TEXTS):
        yield unicodedata.normalize("NFC", "".join(chosen.choices(PARTS, k=chosen.randint(3, 24))))


def byte_vocabulary(corpus: list[str]) -> dict[str, Any]:
    """Byte-level BPE."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=6,
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].get),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }


def piece_vocabulary(corpus: list[str]) -> dict[str, Any]:
    """Pieces whose scores fall in the order in which they were made, as SentencePiece's do; rare letters have none."""
    trained = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=80, show_progress=False, max_token_length=8)
    trained.train_from_iterator([text.replace(" ", "▁") for text in corpus], trainer)
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * len(special) + [-float(rank) for rank in range(len(pieces))],
    }


def main(tool: str) -> None:
    corpus = list(texts())
    golden: dict[str, Any] = {"texts": corpus, "bytes": byte_vocabulary(corpus), "pieces": piece_vocabulary(corpus)}
    golden["ids"] = {}
    for name in NAMES:
        kept = [None if name in LEFT_OUT and re.search(LEFT_OUT[name], text) else text for text in corpus]
        golden["ids"][name] = run(tool, golden["bytes"] | {"tokenizer.ggml.pre": name}, kept)
    for prefix in (True, False):
        metadata = golden["pieces"] | {"tokenizer.ggml.add_space_prefix": prefix}
        golden["ids"]["pieces with a space in front" if prefix else "pieces"] = run(tool, metadata, list(corpus))
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


def run(tool: str, metadata: dict[str, Any], corpus: list[str | None]) -> list[list[int] | None]:
    """llama.cpp's ids of each text."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "vocabulary.gguf")
        extra = {"general.architecture": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
        write_gguf(path, extra | metadata, {})
        command = [tool, "-m", str(path), "--ids", "--stdin", "--no-bos", "--no-parse-special", "--no-escape"]
        return [
            None
            if text is None
            else json.loads(subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, check=True).stdout)
            for text in corpus
        ]


if __name__ == "__main__":
    main(sys.argv[1])
