"""Finds a model: a directory, a .gguf file or a Hugging Face hub id.

Reads configs, never code: `auto_map` anywhere and pickled weights are refused.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from octavo.configs.engine import LOAD_FORMATS
from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import refuse_remote_code
from octavo.models_flax.checkpoint.gguf_config import hf_config
from octavo.models_flax.checkpoint.gguf_file import GGUFFile
from octavo.models_flax.checkpoint.gguf_reader import GGUFReader
from octavo.models_flax.checkpoint.safetensors_file import SafetensorsReader, has_safetensors
from octavo.models_flax.checkpoint.tensors import TensorReader, unique_object

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_JSON = 64 << 20  # bytes
CONFIGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
# Never *.py, *.bin or *.pt.
HUB_CONFIGS = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
HUB_WEIGHTS = ["*.safetensors"]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that was found; its weights are opened on demand.

    Attributes:
      name: what was asked for.
      config: in config.json's words, also for GGUF.
      generation_config: generation_config.json, or None.
      tokenizer_dir: where tokenizer files lie, or None: then `gguf_metadata` holds the tokenizer.
      gguf_metadata: all keys of a GGUF file, or None.
      open_tensors: opens the weights; LoadError if there are none or they are malformed.
    """

    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokenizer_dir: pathlib.Path | None
    gguf_metadata: dict[str, Any] | None
    open_tensors: Callable[[], TensorReader]


def resolve(model: str, revision: str | None = None, load_format: str = "auto") -> Source:
    """Finds `model` and reads its configs.

    Args:
      model: a directory, a .gguf file, or a hub id ("org/name"). $HF_HUB_OFFLINE keeps the hub local.
      revision: of a hub id.
      load_format: auto prefers safetensors to GGUF; dummy needs no weights.

    Raises:
      ConfigError: an unknown load_format.
      LoadError: nothing there, unreadable, or only pickles.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        return _from_directory(model, path, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{model} is a file, but not a .gguf file; a safetensors model is a directory")
        return _from_gguf(model, path)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise LoadError(f"there is no {model}")
    return _from_directory(model, _download(model, revision, load_format), load_format)


def _from_directory(name: str, folder: pathlib.Path, load_format: str) -> Source:
    ggufs = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").exists()
    usable = has_config and (load_format == "dummy" or has_safetensors(folder))
    if ggufs and (load_format == "gguf" or (load_format != "safetensors" and not usable)):
        if len(ggufs) > 1:
            raise LoadError(f"{folder} holds several .gguf files; name one: {', '.join(f.name for f in ggufs)}")
        return _from_gguf(name, ggufs[0])
    if not has_config:
        raise LoadError(f"{folder} holds neither config.json nor a .gguf file")
    if load_format == "gguf":
        raise LoadError(f"{folder} holds no .gguf file")
    if load_format != "dummy" and not has_safetensors(folder):
        pickles = sorted(f.name for pattern in PICKLES for f in folder.glob(pattern))
        if pickles:
            raise LoadError(
                f"{folder} holds only pickled weights ({', '.join(pickles[:4])}), which can run code when read; "
                "convert them to safetensors"
            )
        raise LoadError(f"{folder} holds no weights: neither safetensors nor GGUF")
    config = read_json(folder / "config.json")
    refuse_remote_code(config, "config.json")
    for file in CONFIGS:
        if (folder / file).exists():
            refuse_remote_code(read_json(folder / file), file)
    generation = folder / "generation_config.json"
    return Source(
        name=name,
        config=config,
        generation_config=read_json(generation) if generation.exists() else None,
        tokenizer_dir=folder,
        gguf_metadata=None,
        open_tensors=lambda: SafetensorsReader(folder),
    )


def _from_gguf(name: str, path: pathlib.Path) -> Source:
    file = GGUFFile(path)
    config = hf_config(file)
    return Source(
        name=name,
        config=config,
        generation_config=None,
        tokenizer_dir=None,
        gguf_metadata=file.metadata,
        open_tensors=lambda: GGUFReader(file),
    )


def _download(model: str, revision: str | None, load_format: str) -> pathlib.Path:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", model):
        raise LoadError(f"{model} is neither a file or directory here nor a hub id")
    # Imported here: a model on disk should not wait for an HTTP client.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    weights = [] if load_format == "dummy" else ["*.gguf"] if load_format == "gguf" else HUB_WEIGHTS
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*HUB_CONFIGS, *weights],
                local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
            )
        )
    except LocalEntryNotFoundError as error:
        raise LoadError(f"{model} is no directory here, not in the hub's cache, and the hub is out of reach") from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise LoadError(f"{model} is no directory here, and the hub does not give it: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object of bounded size from a checkpoint."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise LoadError(f"{path} is larger than {MAX_JSON} bytes")
        content = json.loads(path.read_bytes(), object_pairs_hook=unique_object)
    except LoadError as error:
        raise LoadError(f"{path.name}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} is not a JSON object")
    return content
