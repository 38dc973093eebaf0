"""Finds the tokenizer that belongs to a model."""

import pathlib

from octavo.configs.engine import EngineConfig
from octavo.engine.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.engine.text.hf_tokenizer import has_tokenizer, tokenizer_from_directory
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models_flax.checkpoint import Source, resolve


def load_tokenizer(config: EngineConfig, source: Source) -> Tokenizer | None:
    """The tokenizer that the options name, or the model's own; None for a dummy model that has none.

    Raises:
      LoadError: it is missing, broken or of an unknown kind.
    """
    if config.tokenizer is not None:
        folder = pathlib.Path(config.tokenizer).expanduser()
        if folder.is_dir():
            return tokenizer_from_directory(folder)
        source = resolve(config.tokenizer, load_format="gguf" if folder.suffix == ".gguf" else "dummy")
    if source.tokenizer_dir is not None:
        if config.load_format == "dummy" and not has_tokenizer(source.tokenizer_dir):
            return None
        return tokenizer_from_directory(source.tokenizer_dir)
    return tokenizer_from_gguf(source.gguf_metadata or {})
