"""The engine: `Engine` for people, `EngineCore` for what serves many."""

from octavo.engine.engine import Engine
from octavo.engine.errors import (
    ConfigError,
    EngineDeadError,
    KVCacheMemoryError,
    LoadError,
    OctavoError,
    RequestError,
)
from octavo.engine.request import SamplingParams
from octavo.engine.text.output import CompletionOutput, Logprob, Piece, RequestOutput

__all__ = [
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineDeadError",
    "KVCacheMemoryError",
    "LoadError",
    "Logprob",
    "OctavoError",
    "Piece",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
