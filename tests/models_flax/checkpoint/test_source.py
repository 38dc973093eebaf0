"""Finding a model: directories, files, the hub; what is never opened."""

import json
import pathlib
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.configs.errors import ConfigError, LoadError
from octavo.models_flax.checkpoint import resolve
from octavo.models_flax.checkpoint.safetensors_file import SafetensorsReader
from tests.references.gguf_files import write_gguf
from tests.references.tiny_models import BY_NAME, write_checkpoint

EVIL = {"auto_map": {"AutoConfig": "evil.Config"}}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_checkpoint(BY_NAME["llama-eos-list"], tmp_path / "model")
    return tmp_path / "model"


def add_gguf(folder: pathlib.Path, name: str = "model.gguf") -> pathlib.Path:
    metadata = {"general.architecture": "llama", "llama.embedding_length": 4, "llama.attention.head_count": 1}
    write_gguf(folder / name, metadata, {"token_embd.weight": (np.zeros((8, 4)), "F32")})
    return folder / name


def test_a_directory(folder: pathlib.Path) -> None:
    source = resolve(str(folder))
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    assert source.generation_config == {"eos_token_id": [2, 11, 13]}
    assert source.tokenizer_dir == folder
    assert source.gguf_metadata is None
    assert isinstance(source.open_tensors(), SafetensorsReader)
    (folder / "generation_config.json").unlink()
    assert resolve(str(folder)).generation_config is None


def test_gguf_file_and_directory(tmp_path: pathlib.Path) -> None:
    path = add_gguf(tmp_path)
    for model in (path, tmp_path):
        source = resolve(str(model))
        assert source.config["architectures"] == ["LlamaForCausalLM"]
        assert source.tokenizer_dir is None
        assert source.gguf_metadata is not None and source.gguf_metadata["llama.embedding_length"] == 4
    add_gguf(tmp_path, "second.gguf")
    with pytest.raises(LoadError, match=r"several \.gguf files; name one: model\.gguf, second\.gguf"):
        resolve(str(tmp_path))


def test_load_format_chooses_where_both_are(folder: pathlib.Path) -> None:
    add_gguf(folder)
    assert resolve(str(folder)).gguf_metadata is None
    assert resolve(str(folder), load_format="safetensors").gguf_metadata is None
    assert resolve(str(folder), load_format="gguf").gguf_metadata is not None
    with pytest.raises(ConfigError, match="load_format must be one of auto, safetensors, gguf, dummy, got 'pt'"):
        resolve(str(folder), load_format="pt")


def test_dummy_needs_a_config_only(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    assert resolve(str(folder), load_format="dummy").config["vocab_size"] == 320


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_unread(name: str, folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(LoadError, match=r"only pickled weights .*; convert them to safetensors"):
        resolve(str(folder))


def test_pickles_beside_safetensors_are_ignored(folder: pathlib.Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "lm_head.weight" in resolve(str(folder)).open_tensors().tensors


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", EVIL),
        ("config.json", {"vision_config": EVIL}),
        ("tokenizer_config.json", EVIL),
        ("processor_config.json", {"a": [EVIL]}),
        ("preprocessor_config.json", EVIL),
    ],
    ids=str,
)
def test_code_is_refused(file: str, content: dict[str, Any], folder: pathlib.Path) -> None:
    existing = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(existing | content))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(LoadError, match=rf"{file} asks to run code of its own .*auto_map"):
        resolve(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a":' * 50_000, "\0"], ids=range(6))
def test_broken_configs(content: str, folder: pathlib.Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(LoadError, match=r"config\.json"):
        resolve(str(folder))


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LoadError, match=r"neither config\.json nor a \.gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="no weights: neither safetensors nor GGUF"):
        resolve(str(tmp_path))
    with pytest.raises(LoadError, match=r"holds no \.gguf file"):
        resolve(str(tmp_path), load_format="gguf")
    with pytest.raises(LoadError, match=r"not a \.gguf file; a safetensors model is a directory"):
        resolve(str(tmp_path / "config.json"))
    for absent in ("nowhere.gguf", "/nowhere/at/all"):
        with pytest.raises(LoadError, match=f"there is no {absent}"):
            resolve(absent)
    with pytest.raises(LoadError, match="neither a file or directory here nor a hub id"):
        resolve("a/b/c")


def test_the_hub_gives_a_directory(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name", revision="v1").tokenizer_dir == folder
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    assert asked["local_files_only"] == huggingface_hub.constants.HF_HUB_OFFLINE
    patterns = asked["allow_patterns"]
    assert "*.safetensors" in patterns and not any(p.endswith((".py", ".bin", ".pt")) or p == "*" for p in patterns)
    resolve("org/name", load_format="dummy")
    assert "*.safetensors" not in asked["allow_patterns"]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), OSError("disk"), ValueError("bad")], ids=repr)
def test_hub_errors_are_load_errors(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(LoadError, match="org/name is no directory here"):
        resolve("org/name")
