"""Finding a model and filling it: `load_model(resolve(name), config, dtype=...)`."""

from octavo.models_flax.checkpoint.loader import load_model
from octavo.models_flax.checkpoint.source import Source, resolve

__all__ = ["Source", "load_model", "resolve"]
