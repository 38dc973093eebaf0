"""The exception tree.

OctavoError                         configs/errors.py
├── ConfigError(ValueError)         the engine cannot start with these options
│   └── KVCacheMemoryError          no room for the KV cache: needed and available are named
├── LoadError(ValueError)           a checkpoint, tokenizer or template cannot be used
├── RequestError(ValueError)        one request is wrong: field and limit named, nobody else hurt
└── EngineDeadError(RuntimeError)   the device or the loop failed; nothing more will come
"""

from octavo.configs.errors import ConfigError, LoadError, OctavoError

__all__ = ["ConfigError", "EngineDeadError", "KVCacheMemoryError", "LoadError", "OctavoError", "RequestError"]


class RequestError(OctavoError, ValueError):
    """A request that cannot be served. `field` names what is wrong with it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class KVCacheMemoryError(ConfigError):
    """The KV cache has no room."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine stopped for good."""
