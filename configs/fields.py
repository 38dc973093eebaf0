"""Checks that the fields of an options dataclass hold what their annotations say; converts nothing."""

import dataclasses
import types
import typing
from typing import Any

from octavo.configs.errors import ConfigError

_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple[int, ...]: "a tuple of integers",
    tuple[str, ...]: "a tuple of strings",
    dict[str, object]: "a dict whose keys are strings",
    types.NoneType: "None",
}


def check_types(options: Any) -> None:
    """Raises ConfigError for the first field of a dataclass whose value has another type than it declares.

    An integer is a number as well, a bool is neither, and a list is no tuple.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        hint, value = hints[field.name], getattr(options, field.name)
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_fits(value, kind) for kind in allowed):
            words = " or ".join(_WORDS[kind] for kind in allowed)
            raise ConfigError(f"{field.name} must be {words}, got {value!r}")


def _fits(value: object, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is not None:  # entries of a tuple, keys of a dict
        return isinstance(value, origin) and all(_fits(item, arguments[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
