"""Tokenizers from directories."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from octavo.configs.errors import LoadError
from octavo.engine.errors import RequestError
from octavo.engine.text.hf_tokenizer import tokenizer_from_directory
from octavo.engine.text.tokenizer import Tokenizer
from tests.references import byte_tokenizer as bt
from tests.references import piece_tokenizer as pt


def edit(folder: pathlib.Path, name: str = "tokenizer_config.json", **changes: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    bt.write_tokenizer(tmp_path, 320)
    return tmp_path


def test_text_becomes_bytes_and_back(byte_tokenizer: Tokenizer) -> None:
    text = "a é日🙂\n"
    assert byte_tokenizer.encode(text) == bt.byte_ids(text)
    assert byte_tokenizer.decode(bt.byte_ids(text)) == text
    assert byte_tokenizer.vocab_size == 320
    assert (byte_tokenizer.bos_token_id, byte_tokenizer.eos_token_id) == (1, 2)
    assert byte_tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_special_tokens_are_read_in_text_and_skipped(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("<|im_start|>a")
    assert ids == [3, *bt.byte_ids("a")]
    assert byte_tokenizer.decode(ids) == "a"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a"


def test_single_tokens(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    """B014: alternatives are decoded alone, and bytes can be joined."""
    half = bt.piece_id(b"\xf0\x9f")
    assert byte_tokenizer.token_text(half) == "\ufffd"
    assert byte_tokenizer.token_bytes(half) == b"\xf0\x9f"
    assert byte_tokenizer.token_text(bt.piece_id(b" world")) == " world"
    assert byte_tokenizer.token_bytes(2) == b"</s>"
    assert piece_tokenizer.token_text(pt.piece_id("▁the")) == " the"
    assert piece_tokenizer.token_text(pt.piece_id("▁")) == " "
    assert piece_tokenizer.token_bytes(pt.byte_ids(b"\xe6")[0]) == b"\xe6"
    assert byte_tokenizer.token_text(10_000) == ""


def test_bos_only_where_asked(piece_tokenizer: Tokenizer) -> None:
    assert piece_tokenizer.encode("he")[0] == 1
    assert 1 not in piece_tokenizer.encode("he", add_special_tokens=False)


def test_add_bos_token_in_the_config_decides(folder: pathlib.Path) -> None:
    assert tokenizer_from_directory(folder).encode("a") == bt.byte_ids("a")
    edit(folder, add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_directory(folder).encode("a") == [1, *bt.byte_ids("a"), 2]
    edit(folder, add_bos_token=True, add_eos_token=False)
    assert tokenizer_from_directory(folder).encode("a") == [1, *bt.byte_ids("a")]
    edit(folder, add_bos_token=False)
    assert tokenizer_from_directory(folder).encode("a") == bt.byte_ids("a")


def test_truncation_and_padding_in_the_file_are_ignored(folder: pathlib.Path) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    edit(
        folder,
        "tokenizer.json",
        truncation=truncation,
        padding=padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
    )
    assert tokenizer_from_directory(folder).encode("abcdef") == bt.byte_ids("abcdef")


def test_what_the_config_calls_special_is_skipped(folder: pathlib.Path) -> None:
    edit(folder, eos_token={"content": "a", "lstrip": False}, additional_special_tokens=["b"])
    tokenizer = tokenizer_from_directory(folder)
    a, b = bt.byte_ids("ab")
    assert {a, b} <= tokenizer.special_ids
    assert tokenizer.eos_token_id == a
    assert tokenizer.vocab_size == 320


def test_chat_template_files(folder: pathlib.Path) -> None:
    assert tokenizer_from_directory(folder).chat_template == bt.CHAT_TEMPLATE
    edit(folder, chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    assert tokenizer_from_directory(folder).chat_templates == {"default": "D", "tool_use": "T"}
    edit(folder, "chat_template.json", chat_template="J")
    assert tokenizer_from_directory(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("É")
    assert tokenizer_from_directory(folder).chat_template == "É"


def test_code_and_broken_files_are_refused(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    edit(folder, auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(LoadError, match="auto_map"):
        tokenizer_from_directory(folder)
    edit(folder, auto_map=None, chat_template=5)
    with pytest.raises(LoadError, match="chat_template"):
        tokenizer_from_directory(folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        tokenizer_from_directory(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        tokenizer_from_directory(folder)
    with pytest.raises(LoadError, match="no tokenizer"):
        tokenizer_from_directory(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"additional_special_tokens": 5}, "additional_special_tokens must be a list or an object, got 5"),
        ({"additional_special_tokens": "b"}, "additional_special_tokens must be a list or an object, got 'b'"),
        ({"additional_special_tokens": [[]]}, r"each of additional_special_tokens must be a string, got \[\]"),
        ({"extra_special_tokens": {"image": 5}}, "each of extra_special_tokens must be a string, got 5"),
        ({"bos_token": {"content": 5}}, "bos_token must be a string, got 5"),
        ({"bos_token": "\ud800"}, "bos_token holds a lone surrogate"),
    ],
    ids=ascii,
)
def test_special_tokens_that_are_no_text(folder: pathlib.Path, changes: dict[str, object], message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(LoadError, match=message):
        tokenizer_from_directory(folder)


def test_sentencepiece_files_need_its_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="install the package sentencepiece"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("text", [None, 5, b"bytes"])
def test_prompts_that_are_no_text(byte_tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match="string or token ids"):
        byte_tokenizer.encode(text)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_named(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        byte_tokenizer.encode("ab\ud800")


def test_tokenizer_json_needs_no_transformers(folder: pathlib.Path) -> None:
    code = (
        "import sys; from octavo.engine.text.hf_tokenizer import tokenizer_from_directory as f; "
        f"f({str(folder)!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
