"""Command-line flags from configuration dataclasses, so that every option exists once.

Refuses types that it has no spelling for, when the parser is built.
"""

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def add_config_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    skip: frozenset[str] = frozenset(),
    defaults: dict[str, Any] | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    only_given: bool = False,
) -> None:
    """Adds one flag for each field of a dataclass, with the help of its docstring's Attributes.

    Args:
      parser: gets a group of flags.
      config: a dataclass whose fields all have defaults, but those in `skip`.
      skip: fields without a flag.
      defaults: values that replace the fields' own.
      aliases: more spellings of a field's flag.
      only_given: a flag that is not given leaves nothing in the namespace (rather than its default).
    """
    group = parser.add_argument_group(f"{config.__name__} options")
    hints = typing.get_type_hints(config)
    texts = attribute_texts(config.__doc__ or "")
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = (defaults or {}).get(field.name, default)
        flags = (flag_of(field.name), *(aliases or {}).get(field.name, ()))
        text = texts.get(field.name, "").replace("%", "%%")
        if default not in (None, {}, (), ""):
            text = f"{text} (default: {shown(default)})".strip()
        if only_given:
            default = argparse.SUPPRESS
        if hints[field.name] is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(*flags, dest=field.name, action=action, default=default, help=text)
        elif hints[field.name] == tuple[str, ...]:
            options: dict[str, Any] = {"type": _strings, "nargs": "+", "action": _Several, "default": default}
            group.add_argument(*flags, dest=field.name, help=text, metavar="…", **options)
        else:
            reader = _reader(hints[field.name])
            group.add_argument(*flags, dest=field.name, type=reader, default=default, help=text, metavar="…")


def from_flags(args: argparse.Namespace, config: type[Any], skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments for `config` that were parsed."""
    values = vars(args)
    return {field.name: values[field.name] for field in dataclasses.fields(config) if field.name not in skip}


def flag_of(name: str) -> str:
    """max_model_len -> --max-model-len"""
    return "--" + name.replace("_", "-")


def shown(default: object) -> str:
    """A default as the help and the documentation show it."""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


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


class _Several(argparse.Action):
    """Collects strings over all uses of a flag; the first use replaces the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = vars(namespace).get(self.dest, self.default)
        before = before if isinstance(before, _Given) else ()
        setattr(namespace, self.dest, _Given((*before, *(text for texts in values for text in texts))))


class _Given(tuple[str, ...]):
    """Strings from the command line, as opposed to a default."""

    __slots__ = ()


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


def _strings(text: str) -> tuple[str, ...]:
    """A word as it is, or a JSON list of strings, as vLLM's CORS flags take them."""
    if not text.startswith("["):
        return (text,)
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON list of strings, or a word")
    return tuple(value)


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
