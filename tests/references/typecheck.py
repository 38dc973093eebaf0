"""The type checker behind jaxtyping's import hook: arguments and results of every function, no constructors."""

from collections.abc import Callable
from typing import Any

import beartype

_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # an int may stand for a float


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a function, and leaves the `__init__` that a dataclass generates alone.

    jax builds pytree dataclasses with placeholders instead of arrays, so their
    fields carry a comment about the shape and no checked type.
    """
    generated = function.__name__ == "__init__" and function.__code__.co_filename == "<string>"
    return function if generated else _check(function)
