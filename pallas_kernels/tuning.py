"""Tuned parameters, one JSON file per kind of device in `tuned/`: package data that `tune` writes and start-up reads.

    {"device": …, "date": …, "versions": {…},
     "ops": {op: [{"for": {what it was tuned for}, "parameters": {…}, "gain": …}, …]}}

A device without a file, or shapes without an entry, have the defaults. Knows no op.
"""

import json
import pathlib
import re
from typing import Any

from octavo.configs.errors import ConfigError

FOLDER = pathlib.Path(__file__).with_name("tuned")


def path_for(device_kind: str, folder: pathlib.Path | None = None) -> pathlib.Path:
    """ "NVIDIA H200" -> nvidia_h200.json."""
    return (folder or FOLDER) / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json")


def read(device_kind: str, folder: pathlib.Path | None = None) -> dict[str, Any] | None:
    """The file of a device, or None where there is none.

    Raises:
      ConfigError: the file is not of this form.
    """
    path = path_for(device_kind, folder)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        for entries in found["ops"].values():
            for entry in entries:
                dict(entry["for"]), dict(entry["parameters"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of tuned parameters: {error!r}") from error
    return dict(found)


def lookup[P](
    device_kind: str, op: str, wanted: dict[str, Any], default: P, make: Any, folder: pathlib.Path | None = None
) -> P:
    """The parameters of `op` for `wanted` on a device; `default` where none were tuned.

    Args:
      device_kind: of the device, as jax calls it.
      op: its name.
      wanted: what an entry's "for" must equal.
      default: parameters, where there is no entry.
      make: what takes an entry's parameters as keywords.

    Raises:
      ConfigError: an entry has a parameter that the op does not have.
    """
    found = read(device_kind, folder)
    for entry in [] if found is None else found["ops"].get(op, []):
        if entry["for"] == wanted:
            try:
                parameters: P = make(**entry["parameters"])
            except TypeError as error:
                raise ConfigError(f"{path_for(device_kind, folder)}: {op} has other parameters: {error}") from error
            return parameters
    return default


def write(path: pathlib.Path, head: dict[str, Any], op: str, entries: list[dict[str, Any]]) -> None:
    """Puts entries of one op into a device's file; those of other ops, and for other shapes, stay."""
    old = json.loads(path.read_text())["ops"] if path.exists() else {}
    new = [entry["for"] for entry in entries]
    kept = [entry for entry in old.get(op, []) if entry["for"] not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "ops": {**old, op: kept + entries}}, indent=1) + "\n")
