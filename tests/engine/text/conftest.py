"""The two kinds of tokenizers."""

import pathlib

import pytest

from octavo.engine.text.hf_tokenizer import tokenizer_from_directory
from octavo.engine.text.tokenizer import Tokenizer
from tests.references.byte_tokenizer import write_tokenizer
from tests.references.piece_tokenizer import make_piece_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: pathlib.Path = tmp_path_factory.mktemp("byte_tokenizer")
    write_tokenizer(folder, 320)
    return tokenizer_from_directory(folder)


@pytest.fixture(scope="session")
def piece_tokenizer() -> Tokenizer:
    return make_piece_tokenizer()
