"""The exception tree.

OctavoError                         configs/errors.py
├── ConfigError(ValueError)         the engine cannot start with these options
│   └── KVCacheMemoryError          no room for the KV cache: needed and available are named
├── LoadError(ValueError)           a checkpoint, tokenizer or template cannot be used
├── RequestError(ValueError)        one request is wrong: field and limit named, nobody else hurt
├── QueueFullError(RuntimeError)    too many requests wait; nothing is wrong with this one, later
└── EngineDeadError(RuntimeError)   the device or the loop failed; nothing more will come
"""

from octavo.configs.errors import ConfigError, LoadError, OctavoError

__all__ = [
    "ConfigError",
    "EngineDeadError",
    "KVCacheMemoryError",
    "LoadError",
    "OctavoError",
    "QueueFullError",
    "RequestError",
]


class RequestError(OctavoError, ValueError):
    """A request that cannot be served. `field` names what is wrong with it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(OctavoError, RuntimeError):
    """As many requests wait as may; nothing was queued."""


class KVCacheMemoryError(ConfigError):
    """The KV cache has no room."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine stopped for good."""
