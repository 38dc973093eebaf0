"""The sandbox's own filters and functions, and the checks that operators, methods and Jinja's filters need before.

Each refuses, with TemplateLimitError, what would be too large before it is built.
"""

import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.filters import make_attrgetter

from octavo.engine.text.sandbox_sizes import MAX_ITEMS, TemplateLimitError, check_bits, check_size, size_of

MAX_PATTERN = 256  # characters to search backwards for or to strip: Python's search takes the product of the lengths
MAX_SLOW = 1 << 20  # characters for filters that work in Python, one word at a time
MAX_ERROR = 2000  # characters of a template's own message

_WIDE = re.compile(r"\d{4,}")
_PATTERN_METHODS = frozenset(["strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"])
_ITEM_FILTERS = frozenset(
    [
        "batch",
        "groupby",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "sort",
        "sum",
        "unique",
    ]
)
_SLOW_FILTERS = frozenset(["title", "wordcount", "urlencode"])


def check_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """What Jinja's filters must not be asked for; args[0] is the value."""
    length = len(args[0]) if args and isinstance(args[0], str) else 0
    if length > MAX_ITEMS and name in _ITEM_FILTERS:
        raise TemplateLimitError(f"{name} has a text of more than {MAX_ITEMS} characters to go through")
    if name == "trim":
        check_search("strip", (*args[1:], *kwargs.values()))
    elif length > MAX_SLOW and name in _SLOW_FILTERS:
        raise TemplateLimitError(f"{name} has a text longer than {MAX_SLOW}")
    elif name in ("batch", "round"):
        for count in (*args[1:], *kwargs.values()):
            if isinstance(count, int) and abs(count) > MAX_ITEMS:
                raise TemplateLimitError(f"{name} has the number {str(count)[:40]}, at most {MAX_ITEMS}")
    elif name == "sum":
        start = kwargs.get("start", args[2] if len(args) > 2 else 0)
        if not isinstance(start, int | float):
            raise TemplateLimitError("sum adds numbers only")


def check_search(method: str, args: tuple[Any, ...]) -> None:
    if method in _PATTERN_METHODS and any(isinstance(arg, str) and len(arg) > MAX_PATTERN for arg in args):
        raise TemplateLimitError(f"{method} has a pattern longer than {MAX_PATTERN}")


def check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        if not isinstance(left, str) and len(left) + len(right) > MAX_ITEMS:
            raise TemplateLimitError(f"a sum of lists has more than {MAX_ITEMS} items")
        check_size(len(left) + len(right), "a sum of texts")


def check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            check_size(size_of(value) * count, "a repeated text or list")
            if not isinstance(value, str) and len(value) * count > MAX_ITEMS:
                raise TemplateLimitError(f"a repeated list has more than {MAX_ITEMS} items")
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left, right.bit_length())


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(1, left.bit_length() * max(right, 0))


def check_format(pattern: str, sign: str, args: Iterable[Any]) -> None:
    """Refuses widths of four digits and widths that come from arguments (`*`, or braces in braces).

    Args:
      pattern: the text to fill in.
      sign: what a field begins with, "{" or "%".
      args: what is filled in; each field might hold the largest.
    """
    inside = re.search(r"\{[^{}]*\{" if sign == "{" else r"%[^a-zA-Z%]*\*", pattern.replace("{{", ""))
    if inside or _WIDE.search(pattern):
        raise TemplateLimitError(f"the format {pattern[:60]!r} may be too wide")
    largest = max(map(size_of, args), default=0)
    check_size(len(pattern) + pattern.count(sign) * largest, "a formatted text")


@jinja2.pass_environment
def join_filter(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """`join`."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return join(value, d)


def join(values: Iterable[Any], separator: str = "") -> str:
    """The texts of `values`, measured before they are joined."""
    separator = str(separator)
    texts, size = [], 0
    for value in itertools.islice(values, MAX_ITEMS + 1):
        text = str(value)
        size += len(text) + len(separator)
        check_size(size, "a joined text")
        texts.append(text)
    if len(texts) > MAX_ITEMS:
        raise TemplateLimitError(f"a joined text has more than {MAX_ITEMS} parts")
    return separator.join(texts)


def replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    """`replace`, measured before it is built."""
    text, old, new = str(value), str(old), str(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    check_size(len(text) + times * max(len(new) - len(old), 0), "a text with replacements")
    return text.replace(old, new, times)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """`indent`, with a width of at most 64."""
    prefix = width if isinstance(width, str) else " " * min(max(width, 0), 64)
    if len(prefix) > 64:
        raise TemplateLimitError("indent has a width above 64")
    text = str(value)
    check_size(len(text) + len(prefix) * (text.count("\n") + 1), "an indented text")
    first_line, *lines = text.split("\n")
    rest = [prefix + line if line or blank else line for line in lines]
    return "\n".join([prefix + first_line if first else first_line, *rest])


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """`format`: the % operator."""
    pattern = str(value)
    check_format(pattern, "%", (*args, *kwargs.values()))
    return pattern % (kwargs or args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for models to read: other alphabets stay as they are, nothing is escaped for HTML."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise TemplateLimitError(f"tojson has the indent {indent}, at most 16")
    if separators is not None and any(len(separator) > 8 for separator in separators):
        raise TemplateLimitError("tojson has a separator of more than 8 characters")
    size_of(value, int(indent or 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> NoReturn:
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(str(message)[:MAX_ERROR])


def strftime_now(pattern: str) -> str:
    """The time, in a form of at most 256 characters."""
    if len(pattern) > 256:
        raise TemplateLimitError("strftime_now has a pattern of more than 256 characters")
    return datetime.datetime.now().strftime(pattern)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "join": join_filter,
    "replace": replace,
    "tojson": _tojson,
}
