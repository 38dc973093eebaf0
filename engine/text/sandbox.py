"""Jinja as checkpoints expect it, in a sandbox with limits on time, steps and memory.

A template comes with the model or a request and sees what users write, so none of them is trusted: no attribute that
leads out of the data, no change of the caller's objects, and nothing that runs or grows without bound. Refuses
the filters and methods that exist to pad or format strings to any width.

How the limits hold: every filter, call, loop turn, output and comparison of unknown length counts a step and looks at
the clock, and all that is built is measured, nested values as often as they occur. So no value is larger than
MAX_SIZE, and between two looks at the clock there is only work on a few values of at most that size.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from octavo.engine.text import sandbox_filters as own
from octavo.engine.text.sandbox_sizes import MAX_ITEMS, MAX_SIZE, TemplateLimitError, check_bits, size_of

MAX_SOURCE = 128 << 10  # characters of a template: compiling it takes about a second at most
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
MAX_BYTES = 512 << 20  # of all texts and lists that one rendering builds, whether it keeps them or not

_BUDGET = " budget"  # a variable that no template can name, since it holds a space; so are our filters
_WIDENING_METHODS = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "format_map", "translate", "encode", "to_bytes", "striptags"]
)
_WIDENING_FILTERS = ("center", "wordwrap", "pprint", "xmlattr", "urlize", "slice", "striptags")
_PICKING_FILTERS = frozenset(["default", "d", "first", "last", "attr", "random", "min", "max"])  # build nothing
_COMPARING_TESTS = ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "ge", ">=")


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("_built", "_deadline", "_steps")

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._steps = 0
        self._built = 0

    def step(self, num_bytes: int = 0) -> None:
        self._steps += 1
        self._built += num_bytes
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if self._built > MAX_BYTES:
            raise TemplateLimitError(f"it builds more than {MAX_BYTES} bytes")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")

    def built(self, value: Any) -> Any:
        """Counts a new value; an iterator comes back as one that counts its items."""
        if isinstance(value, str):
            if len(value) > MAX_SIZE:
                raise TemplateLimitError(f"a text is longer than {MAX_SIZE}")
            self.step(sys.getsizeof(value))
            return value
        if isinstance(value, Iterator):
            return self._counted(value)
        if isinstance(value, list | tuple | Mapping):
            if len(value) > MAX_ITEMS:
                raise TemplateLimitError(f"a list has more than {MAX_ITEMS} items")
            size_of(value)
            self.step(sys.getsizeof(value))
            return value
        check_bits(value)
        self.step()
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            yield self.built(value)


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises jinja2.TemplateError."""
    if len(source) > MAX_SOURCE:
        raise TemplateLimitError(f"it has {len(source)} characters, at most {MAX_SOURCE}")
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
    parts, size = [], 0
    for part in template.generate({**variables, _BUDGET: _Budget()}):
        size += len(part)
        if size > MAX_SIZE:
            raise TemplateLimitError(f"the result is longer than {MAX_SIZE} characters")
        parts.append(part)
    return "".join(parts)


class _Namespace(Namespace):
    """The one object that templates change: it may come to hold itself, so it does not show what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, and our limits."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
            finalize=_finalize,
        )
        for name in ("lipsum", "cycler"):
            self.globals.pop(name, None)
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = own.raise_exception
        self.globals["strftime_now"] = own.strftime_now
        filters = {**self.filters, **own.FILTERS}
        self.filters = {
            name: _limited(name, function) for name, function in filters.items() if name not in _WIDENING_FILTERS
        }
        self.filters |= {" step": _step, " built": _built, " concat": _concat, " slice": _slice}
        self.tests |= {name: _limited(name, cast(Callable[..., Any], self.tests[name])) for name in _COMPARING_TESTS}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            own.check_sum(left, right)
        elif operator == "*":
            own.check_product(left, right)
        elif operator == "**":
            own.check_power(left, right)
        elif isinstance(left, str):
            own.check_format(left, "%", right if isinstance(right, tuple) else (right,))
        return context[_BUDGET].built(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        widens = attr in _WIDENING_METHODS and isinstance(obj, str | bytes | int)
        return not widens and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            own.check_format(value.__self__, "{", (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = context[_BUDGET]
        budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = function.__name__
            for inside in ("_loop_vars", "_block_vars"):  # what jinja adds to calls in loops and blocks
                kwargs.pop(inside, None)
            if name == "join" and args:
                return budget.built(own.join(args[0], owner))
            if name == "replace" and len(args) >= 2:
                return budget.built(own.replace(owner, *args, **kwargs))
            own.check_search(name, args)
        return budget.built(super().call(context, function, *args, **kwargs))


class _GenerationBlocks(Extension):
    """{% generation %} … {% endgeneration %} marks what an assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limiter(NodeTransformer):
    """Puts the counting into what the environment has no hook for: bodies, ~, literals, slices, comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._count_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._count_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._count_body(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _measured_first(node.filter, node.lineno)
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.FilterBlock:
        self.generic_visit(node)
        node.filter = _measured_first(node.filter, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node.nodes[0], " concat", node.nodes[1:])

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._count_literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._count_literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._count_literal(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, " slice") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_short = len(operands) == 2 and any(isinstance(operand, nodes.Const) for operand in operands)
        is_equality = all(operand.op in ("eq", "ne") for operand in node.ops)
        self.generic_visit(node)
        return node if is_short and is_equality else _filter(node, " built")

    def _count_body[BodyT: nodes.For | nodes.Macro | nodes.CallBlock](self, node: BodyT) -> BodyT:
        num_bytes = 4 * sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _filter(nodes.Const(num_bytes, lineno=node.lineno), " step")
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def _count_literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return node if _is_constant(node) else _filter(node, " built")


def _is_constant(node: nodes.Node) -> bool:
    """Whether it is written out in full: then the template's own length bounds it."""
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair):
        return all(map(_is_constant, node.iter_child_nodes()))
    return isinstance(node, nodes.Const)


def _measured_first(outer: nodes.Filter | None, lineno: int) -> nodes.Filter:
    """A block's filters, with a first one that measures its text."""
    measured = nodes.Filter(None, " built", [], [], None, None, lineno=lineno)
    if outer is None:
        return measured
    inner = outer
    while isinstance(inner.node, nodes.Filter):
        inner = inner.node
    inner.node = measured
    return outer


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, args or [], [], None, None, lineno=value.lineno)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """What {{ … }} writes. Counted here, since blocks and macros gather it before anything else sees it."""
    text = str(value)
    context[_BUDGET].built(text)
    return text


@jinja2.pass_context
def _step(context: Context, num_bytes: int) -> None:
    context[_BUDGET].step(max(num_bytes, 0))  # `map` can call any filter by name


@jinja2.pass_context
def _built(context: Context, value: Any) -> Any:
    return context[_BUDGET].built(value)


@jinja2.pass_context
def _slice(context: Context, value: Any) -> Any:
    """A part of a value that was measured, or that the caller gave."""
    context[_BUDGET].step(sys.getsizeof(value))
    return value


@jinja2.pass_context
def _concat(context: Context, *values: Any) -> str:
    """`~`, measured before it is built."""
    return context[_BUDGET].built(own.join(values))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that counts, and whose result is measured."""
    passed = _PassArg.from_obj(function)
    picks = name in _PICKING_FILTERS

    @functools.wraps(function, assigned=("__name__", "__doc__"), updated=())
    def limited(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = context[_BUDGET]
        budget.step()
        own.check_arguments(name, args, kwargs)
        if passed is _PassArg.context:
            result = function(context, *args, **kwargs)
        elif passed is _PassArg.eval_context:
            result = function(context.eval_ctx, *args, **kwargs)
        elif passed is _PassArg.environment:
            result = function(context.environment, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        return result if picks else budget.built(result)

    return jinja2.pass_context(limited)
