"""Sizes of template values: how large one may be, and how it is measured. Refuses what is larger."""

from collections.abc import Mapping
from typing import Any

import jinja2

MAX_SIZE = 8 << 20  # characters of a prompt and of any text in between; for nested values, _ITEM_SIZE more an item
MAX_ITEMS = 100_000  # of one list or mapping
MAX_DEPTH = 200
MAX_INTEGER_BITS = 256

_ITEM_SIZE = 8


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or built something too large."""


def size_of(value: Any, indent: int = 0) -> int:
    """Characters and items of a value, nested ones as often as they occur in it.

    Args:
      value: text, numbers, lists, mappings.
      indent: spaces that each item adds for each level above it.

    Raises:
      TemplateLimitError: larger than MAX_SIZE, or nested too deep; found without measuring the rest.
    """
    if isinstance(value, str):
        return _checked(len(value))
    total = 0
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list | tuple | Mapping):
            total = _checked(total + len(item) * (_ITEM_SIZE + indent * (depth + 1)))
            if depth > MAX_DEPTH:
                raise TemplateLimitError(f"a list is nested more than {MAX_DEPTH} deep")
            if isinstance(item, Mapping):
                stack += [(key, depth + 1) for key in item]
                stack += [(inner, depth + 1) for inner in item.values()]
            else:
                stack += [(inner, depth + 1) for inner in item]
        else:
            check_bits(item)
    return _checked(total)


def check_size(size: int, what: str) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"{what} is longer than {MAX_SIZE}")


def check_bits(value: Any, more: int = 0) -> None:
    """Refuses an integer of more than MAX_INTEGER_BITS bits, `more` added."""
    if isinstance(value, int) and value.bit_length() + more > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"an integer has more than {MAX_INTEGER_BITS} bits")


def _checked(size: int) -> int:
    check_size(size, "a text or list, with all that is in it,")
    return size
