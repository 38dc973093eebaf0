"""Checks of single values from outside; each refusal is a RequestError that names field, value and limit."""

import math

from octavo.engine.errors import RequestError


def shown(value: object) -> str:
    """What the caller sent, cut to a length that fits an error message."""
    if type(value) is int and value.bit_length() > 200:
        return "a number of more than 200 bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_integer(name: str, value: object, low: int, high: int = 2**63 - 1, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer, got {shown(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {shown(value)}", name)


def check_number(name: str, value: object, low: float, high: float | None = None, *, above: bool = False) -> None:
    if type(value) not in (int, float):
        raise RequestError(f"{name} must be a number, got {shown(value)}", name)
    too_low = value <= low if above else value < low  # type: ignore[operator]
    if not _finite(value) or too_low or (high is not None and value > high):  # type: ignore[operator]
        least = f"above {low}" if above else f"at least {low}"
        most = "" if high is None else f" and at most {high}"
        raise RequestError(f"{name} must be a finite number {least}{most}, got {shown(value)}", name)


def _finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no float holds
        return False


def check_strings(name: str, value: object) -> None:
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be a list of strings, got {shown(value)}", name)
    if "" in value:
        raise RequestError(f"{name} must not hold an empty string", name)


def check_token_ids(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise RequestError(f"{name} must hold integer token ids", name)
    if most is not None and len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries, at most {most}", name)
    if value and min(value) < 0:
        raise RequestError(f"{name} holds the token id {shown(min(value))}, below 0", name)
