"""Command-line flags from configuration dataclasses, so that every option exists once.

Refuses types that it has no spelling for, when the parser is built.
"""

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any


def add_config_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    skip: frozenset[str] = frozenset(),
    defaults: dict[str, Any] | None = None,
) -> None:
    """Adds one flag for each field of a dataclass, with the help of its docstring's Attributes.

    Args:
      parser: gets a group of flags.
      config: a dataclass whose fields all have defaults, but those in `skip`.
      skip: fields without a flag.
      defaults: values that replace the fields' own.
    """
    group = parser.add_argument_group(f"{config.__name__} options")
    hints = typing.get_type_hints(config)
    texts = attribute_texts(config.__doc__ or "")
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = (defaults or {}).get(field.name, default)
        flag = "--" + field.name.replace("_", "-")
        text = texts.get(field.name, "").replace("%", "%%")
        if default not in (None, {}):
            text = f"{text} (default: {default})".strip()
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            group.add_argument(flag, type=_reader(hints[field.name]), default=default, help=text, metavar="…")


def from_flags(args: argparse.Namespace, config: type[Any], skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments for `config` that were parsed."""
    values = vars(args)
    return {field.name: values[field.name] for field in dataclasses.fields(config) if field.name not in skip}


def attribute_texts(docstring: str) -> dict[str, str]:
    """The descriptions under `Attributes:`, each on one line; a list of names shares its text."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.partition("Attributes:")[2].splitlines():
        if match := re.match(r"^ {6}(\w+(?:, \w+)*): (.*)$", line):
            names = match[1].split(", ")
            texts.update(dict.fromkeys(names, match[2]))
        elif line.strip():
            for name in names:
                texts[name] += " " + line.strip()
    return texts


def _reader(hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if hint in (str, int, float):
        return hint
    origin = typing.get_origin(hint)
    if origin is tuple and typing.get_args(hint)[0] is int:
        return _integers
    if origin is dict:
        return _json_object
    raise TypeError(f"there is no flag for the type {hint}")


def _integers(text: str) -> tuple[int, ...]:
    """1,2,4"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value
