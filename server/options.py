"""The options of `octavo serve`: the command line over a TOML file over the defaults.

Refuses, by name, keys that no option has and values of another type; opens only the files it is told to.
"""

import argparse
import difflib
import pathlib
import tomllib
import types
import typing
from typing import Any

from octavo.configs import env
from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig
from octavo.server.flags import add_config_flags

ALIASES = {  # vLLM's names of the same things
    "max_header_size": ("--h11-max-incomplete-event-size",),
    "max_header_count": ("--h11-max-header-count",),
    "drain_timeout": ("--shutdown-timeout",),
}
FILE_LIMIT = 1 << 20  # bytes of a configuration file or a chat template


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config, and a flag for each field of ServerConfig and EngineConfig."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a directory, a .gguf file or a hub id")
    parser.add_argument("--config", metavar="FILE", help="TOML with the same names; the command line wins")
    add_config_flags(parser, ServerConfig, aliases=ALIASES, only_given=True)
    add_config_flags(parser, EngineConfig, skip=frozenset({"model"}), only_given=True)


def read_options(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What was parsed, as the two configurations.

    Raises:
      ConfigError: an unknown key, a value that cannot be, a file that cannot be read, or no model.
    """
    engine_hints, server_hints = typing.get_type_hints(EngineConfig), typing.get_type_hints(ServerConfig)
    hints = engine_hints | server_hints
    values = {} if args.config is None else read_toml(pathlib.Path(args.config), hints)
    values |= {name: value for name, value in vars(args).items() if name in hints and value is not None}
    if not values.get("model"):
        raise ConfigError("no MODEL: name a directory, a .gguf file or a hub id")
    server = {name: value for name, value in values.items() if name in server_hints}
    if server.get("chat_template") is not None:
        server["chat_template"] = read_template(server["chat_template"])
    server.setdefault("served_model_name", (str(values["model"]),))
    if (key := env.api_key()) is not None:
        server["api_key"] = (*server.get("api_key", ()), key)
    engine = {name: value for name, value in values.items() if name in engine_hints}
    return EngineConfig(**engine), ServerConfig(**server)


def read_toml(path: pathlib.Path, hints: dict[str, Any]) -> dict[str, Any]:
    """The options in a file, by field name; `max-model-len` and `max_model_len` are the same."""
    try:
        table = tomllib.loads(_read(path, "--config"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from None
    names = {alias.removeprefix("--").replace("-", "_"): name for name, flags in ALIASES.items() for alias in flags}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        name = names.get(name, name)
        if name not in hints:
            near = difflib.get_close_matches(name, [*hints, *names], n=3)
            rest = f"; did you mean {' or '.join(n.replace('_', '-') for n in near)}?" if near else ""
            raise ConfigError(f"--config {path}: unknown option {key!r}{rest}")
        if name in values:
            raise ConfigError(f"--config {path}: {key!r} is there twice")
        values[name] = _from_toml(value, hints[name])
    return values


def read_template(given: str) -> str:
    """The text of a chat template: `given` names its file, or is the template itself, as vLLM has it."""
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    return _read(pathlib.Path(given).expanduser(), "--chat-template")


def _from_toml(value: Any, hint: Any) -> Any:
    """TOML has lists and no tuples; one string stands for a list of one. The configurations check the rest."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if typing.get_origin(option) is tuple:
            if isinstance(value, list):
                return tuple(value)
            if isinstance(value, str) and typing.get_args(option)[0] is str:
                return (value,)
    return value


def _read(path: pathlib.Path, flag: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if len(data) > FILE_LIMIT:
        raise ConfigError(f"{flag} {path}: more than {FILE_LIMIT} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: not UTF-8") from None
