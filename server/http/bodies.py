"""Request bodies: bytes under a limit, then JSON as strict as RFC 8259 allows, then a checked model.

Refuses everything but UTF-8 JSON: other content types and encodings (415), too many bytes (413, while they stream
in), NaN and numbers that no float holds, a byte order mark, lone surrogates, deep nesting, and a name that
occurs twice in one object (two readers could take different ones).
"""

import asyncio
import collections
import json
import logging
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from octavo.engine.checks import shown
from octavo.server.http.errors import ApiError, ClientGone

logger = logging.getLogger(__name__)

MAX_DEPTH = 64
MAX_COMMAS = 2 << 20  # bounds the number of values: while Python's parser reads them, nothing else runs
_LONE = re.compile(r"[\ud800-\udfff]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INTEGER = re.compile(r"[0-9]{1,12}")


async def read_body(scope: Scope, receive: Receive, *, max_size: int, timeout: float) -> bytes:
    """The whole body.

    Args:
      scope, receive: of ASGI.
      max_size: bytes.
      timeout: seconds until all of it must have come.

    Raises:
      ApiError: 408, 413 or 415.
      ClientGone: the client hung up before the end.
    """
    check_content_type(scope)
    declared = _header(scope, b"content-length")
    if declared is not None and _INTEGER.fullmatch(declared) is not None and int(declared) > max_size:
        raise _too_large(max_size)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > max_size:
                    raise _too_large(max_size)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout:g} s", headers={"connection": "close"}) from None


def check_content_type(scope: Scope) -> None:
    """Raises ApiError (415) unless the body is plain JSON in UTF-8."""
    media_type, _, parameters = (_header(scope, b"content-type") or "").lower().partition(";")
    charset = re.fullmatch(r'\s*charset\s*=\s*"?([\w-]+)"?\s*;?\s*', parameters)
    if media_type.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        raise ApiError(415, "the content type must be application/json, in UTF-8", param="Content-Type")
    if (_header(scope, b"content-encoding") or "identity").lower() != "identity":
        raise ApiError(415, "the body must come as it is, without a content encoding", param="Content-Encoding")


def decode[M: BaseModel](model: type[M], body: bytes) -> M:
    """The request that a body holds. Names that the model does not know are ignored, with one line in the log.

    Raises:
      ApiError: 400; it is not JSON, not an object, or a field is wrong.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(value)}")
    try:
        request = model.model_validate(value)
    except ValidationError as error:
        raise _field_error(error, value) from None
    if unknown := [name for name in value if name not in model.model_fields]:
        logger.info("ignored %d unknown fields: %s", len(unknown), ", ".join(map(shown, unknown[:5])))
    return request


def parse_json(body: bytes) -> Any:
    """The value of a JSON text. Raises ApiError (400)."""
    if not body:
        raise ApiError(400, "the body is empty")
    if body.startswith(b"\xef\xbb\xbf"):
        raise ApiError(400, "the body must not start with a byte order mark")
    if body.count(b",") > MAX_COMMAS:
        raise ApiError(400, f"the body holds more than {MAX_COMMAS} commas")
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        # Ours, or Python's refusal of an integer of thousands of digits.
        own = isinstance(error, _JSONError)
        raise ApiError(400, f"the body is refused: {error if own else 'a number has too many digits'}") from None
    check_strings = _SURROGATE.search(body) is not None
    _check_tree(value, check_strings)
    return value


class _JSONError(ValueError):
    """What a hook of the decoder refuses."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in names.items() if count > 1)
        raise _JSONError(f"the name {shown(twice)} occurs twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _JSONError(f"the number {text[:40]} is too large")
    return value


def _no_constant(text: str) -> NoReturn:
    raise _JSONError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _check_tree(root: Any, check_strings: bool) -> None:
    """Refuses deep nesting and, where escapes could have made some, lone surrogates."""
    level: list[Any] = [[root]]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for container in level:
            if check_strings:
                _check_text(container)
            items = container.values() if type(container) is dict else container
            if check_strings:
                _check_text(items)
            inner += [item for item in items if type(item) is list or type(item) is dict]
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_text(items: Iterable[Any]) -> None:
    if any(type(item) is str and _LONE.search(item) for item in items):
        raise ApiError(400, "the body holds half of a surrogate pair, which is no character")


def _field_error(error: ValidationError, value: dict[str, Any]) -> ApiError:
    """The first complaint, in our words."""
    first = error.errors(include_url=False, include_input=False)[0]
    field, found = _locate(first["loc"], value)
    kind, context = first["type"], first.get("ctx", {})
    if kind == "missing":
        text = "is missing"
    elif kind == "value_error":  # a validator of ours, which says it all
        text = str(context["error"])
    elif kind in _LIMITS:
        words, key = _LIMITS[kind]
        text = f"must be {words} {context[key]}, got {shown(found)}"
    elif kind in ("too_long", "string_too_long"):
        text = f"must not be longer than {context['max_length']}"
    elif kind in ("too_short", "string_too_short"):
        text = "must not be empty"
    else:
        text = f"{_WANTED.get(kind, 'has a wrong type or value')}, got {_kind(found)}"
    return ApiError(400, f"{field} {text}", param=field)


_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
}
_WANTED = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must be 1 to 128 visible ASCII characters",  # only ids have a pattern
}


def _locate(location: tuple[int | str, ...], value: Any) -> tuple[str, Any]:
    """The name of a field and what stands there; pydantic's location goes on with parts that the request has not."""
    field = ""
    for part in location:
        if field and not _has(value, part):
            break
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
        value = value[part] if _has(value, part) else None
    return field.removeprefix("."), value


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _kind(value: Any) -> str:
    """What JSON calls it, with the value where it is short."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    name = names.get(type(value))
    return shown(value) if name is None else name


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _too_large(max_size: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_size} bytes", code="request_too_large")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
