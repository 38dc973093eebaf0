"""Jinja as checkpoints expect it, in a sandbox with limits on time, steps and memory.

A template comes with the model and sees what users write, so neither is trusted: no attribute that
leads out of the data, no change of the caller's objects, and nothing that runs or grows without bound. Refuses
the filters and methods that exist to pad or format strings to any width.
"""

import dataclasses
import datetime
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT = 16 << 20  # characters of a rendered prompt, and of any string or list in between
MAX_STEPS = 2_000_000  # turns of loops and calls of macros in one rendering
MAX_SECONDS = 5.0
MAX_INTEGER_BITS = 256

_BUDGET = " budget"  # a variable that no template can name, since it holds a space
_WIDENING_METHODS = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "format_map", "translate", "encode", "to_bytes"]
)
_WIDENING_FILTERS = ("center", "wordwrap", "pprint", "xmlattr", "urlize", "slice")
_WIDE = re.compile(r"\d{4,}")


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or built something too large."""


@dataclasses.dataclass(slots=True)
class _Budget:
    deadline: float
    steps: int = 0


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises jinja2.TemplateError."""
    return _Environment().parse(source)


def compile_template(tree: nodes.Template) -> jinja2.Template:
    """Compiles a template, and builds its limits into the tree."""
    return _Environment().from_string(_Limiter().visit(tree))


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a compiled template.

    Raises:
      TemplateLimitError: too long, too many steps, or too large.
      Exception: whatever the template's expressions raise.
    """
    budget = _Budget(time.monotonic() + MAX_SECONDS)
    parts, size = [], 0
    for part in template.generate({**variables, _BUDGET: budget}):
        size += len(part)
        if size > MAX_OUTPUT:
            raise TemplateLimitError(f"the result is longer than {MAX_OUTPUT} characters")
        parts.append(part)
    return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, and our limits."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
        )
        for name in _WIDENING_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.globals.pop("cycler", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        self.filters["format"] = _format
        self.filters["indent"] = _indent
        self.filters["join"] = _join
        self.filters["replace"] = _replace
        self.filters["_step"] = _step
        self.filters["_sized"] = _sized

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _length(left) + _length(right) > MAX_OUTPUT:
            raise TemplateLimitError(f"a sum of texts or lists is longer than {MAX_OUTPUT}")
        if operator == "*":
            _check_product(left, right)
        if operator == "**":
            _check_power(left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left, "*")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        widens = attr in _WIDENING_METHODS and isinstance(obj, str | bytes | int)
        return not widens and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, "{")
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            return _join(args[0], owner)
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return _replace(owner, *args)
        return super().call(context, function, *args, **kwargs)


class _GenerationBlocks(Extension):
    """{% generation %} … {% endgeneration %} marks what an assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limiter(NodeTransformer):
    """Makes every turn of a loop and every call of a macro count, and measures what ~ joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _call("_step", node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, _call("_step", node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(node)
        node.body.insert(0, _call("_step", node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, "_sized")


def _filter(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _call(name: str, lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(None, lineno=lineno), name), lineno=lineno)


@jinja2.pass_context
def _step(context: Context, value: None) -> None:
    budget = context[_BUDGET]
    budget.steps += 1
    if budget.steps > MAX_STEPS:
        raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
    if time.monotonic() > budget.deadline:
        raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")


def _sized(value: Any) -> Any:
    if _length(value) > MAX_OUTPUT:
        raise TemplateLimitError(f"a text is longer than {MAX_OUTPUT}")
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and _length(value) * count > MAX_OUTPUT:
            raise TemplateLimitError(f"a repeated text or list is longer than {MAX_OUTPUT}")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_format(pattern: str, from_argument: str) -> None:
    """Refuses widths of four digits and widths that come from arguments (`*`, or braces in braces)."""
    inside = re.findall(r"\{[^{}]*\{" if from_argument == "{" else r"%[^a-zA-Z%]*\*", pattern.replace("{{", ""))
    if inside or _WIDE.search(pattern):
        raise TemplateLimitError(f"the format {pattern[:60]!r} may be too wide")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"an integer has more than {MAX_INTEGER_BITS} bits")


def _join(value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """`join`, measured before it is built."""
    items = list(value)
    if attribute is not None:
        items = [item[attribute] if isinstance(item, Mapping) else getattr(item, str(attribute)) for item in items]
    texts = [str(item) for item in items]
    if sum(map(len, texts)) + len(d) * len(texts) > MAX_OUTPUT:
        raise TemplateLimitError(f"a joined text is longer than {MAX_OUTPUT}")
    return d.join(texts)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    """`replace`, measured before it is built."""
    text, old, new = str(value), str(old), str(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    if len(text) + times * max(len(new) - len(old), 0) > MAX_OUTPUT:
        raise TemplateLimitError(f"a text with replacements is longer than {MAX_OUTPUT}")
    return text.replace(old, new, times)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """`indent`, with a width of at most 64."""
    prefix = width if isinstance(width, str) else " " * min(max(width, 0), 64)
    if len(prefix) > 64:
        raise TemplateLimitError("indent has a width above 64")
    first_line, *lines = str(value).split("\n")
    rest = [prefix + line if line or blank else line for line in lines]
    return "\n".join([prefix + first_line if first else first_line, *rest])


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """`format`: the % operator."""
    pattern = str(value)
    _check_format(pattern, "*")
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256:
        raise TemplateLimitError("strftime_now has a pattern of more than 256 characters")
    return datetime.datetime.now().strftime(pattern)
