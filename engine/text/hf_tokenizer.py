"""A tokenizer from a directory as Hugging Face lays it out.

tokenizer.json is read with the `tokenizers` library alone; transformers is imported only where there is
nothing but another form (tokenizer.model, vocab.json). Refuses `auto_map`: checkpoints bring data, never code.
"""

import importlib.util
import pathlib
from typing import Any

import tokenizers

from octavo.configs.errors import LoadError
from octavo.configs.model import refuse_remote_code
from octavo.engine.text.tokenizer import Tokenizer, add_around
from octavo.models_flax.checkpoint.source import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def tokenizer_from_directory(path: str | pathlib.Path) -> Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja or .json.

    Raises:
      LoadError: no tokenizer there, a broken file, or one that asks to run code.
    """
    folder = pathlib.Path(path)
    config = _read_object(folder / "tokenizer_config.json")
    refuse_remote_code(config, "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_pipeline(folder / "tokenizer.json")
    else:
        backend = _convert(folder)
    # A token may be declared in either; the newer file wins.
    names = _special_tokens({**_read_object(folder / "special_tokens_map.json"), **config})
    _mark_special(backend, config, names)
    _set_bos_and_eos(backend, config, names)
    return Tokenizer(backend, special_tokens=names, chat_templates=_chat_templates(folder, config))


def has_tokenizer(folder: pathlib.Path) -> bool:
    """Whether the directory holds a tokenizer in any form."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *OTHER_FORMS))


def _read_pipeline(path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"cannot read {path.name}: {error}") from error


def _convert(folder: pathlib.Path) -> tokenizers.Tokenizer:
    forms = [name for name in OTHER_FORMS if (folder / name).is_file()]
    if not forms:
        raise LoadError(f"{folder} holds no tokenizer: neither tokenizer.json nor {', '.join(OTHER_FORMS)}")
    if forms[0].endswith(".model") and importlib.util.find_spec("sentencepiece") is None:
        raise LoadError(
            f"{folder} holds {forms[0]} and no tokenizer.json: to read it, install the package sentencepiece"
        )
    import transformers  # slow to import, and seldom needed

    try:
        converted = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return converted.backend_tokenizer
    except Exception as error:  # anything may go wrong in there
        raise LoadError(f"cannot convert {', '.join(forms)} to a fast tokenizer: {error}") from error


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, empty where the file is not there."""
    return read_json(path) if path.is_file() else {}


def _special_tokens(declared: dict[str, Any]) -> dict[str, str]:
    names = {}
    for name in SPECIAL_NAMES:
        if declared.get(name) is not None:
            names[name] = _content(name, declared[name])
    return names


def _content(name: str, token: object) -> str:
    """The string of a token, which may be an AddedToken written out."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise LoadError(f"tokenizer_config.json: {name} must be a string, got {content!r}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise LoadError(f"tokenizer_config.json: {name} holds a lone surrogate: {content!r}") from error
    return content


def _mark_special(backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """What the config declares special is special, also where tokenizer.json does not say so."""
    for content in dict.fromkeys([*names.values(), *_extra_special_tokens(config)]):
        token_id = backend.token_to_id(content)
        known = backend.get_added_tokens_decoder().get(token_id) if token_id is not None else None
        if token_id is not None and not (known and known.special):
            backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False, special=True)])


def _extra_special_tokens(config: dict[str, Any]) -> list[str]:
    contents = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        listed = list(extra.values()) if isinstance(extra, dict) else extra
        if not isinstance(listed, list):
            raise LoadError(f"tokenizer_config.json: {name} must be a list or an object, got {listed!r}")
        contents += [_content(f"each of {name}", token) for token in listed]
    return contents


def _set_bos_and_eos(backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where the config has them, override what tokenizer.json adds."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    bos, eos = names.get("bos_token"), names.get("eos_token")
    now = backend.encode("", add_special_tokens=True).tokens

    def wanted(option: str, token: str | None) -> str | None:
        add = token in now if config.get(option) is None else config[option]
        return token if add and token is not None and backend.token_to_id(token) is not None else None

    before, after = wanted("add_bos_token", bos), wanted("add_eos_token", eos)
    if [t for t in (before, after) if t is not None] != now:
        add_around(backend, before, after)


def _chat_templates(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for where, declared in (
        ("tokenizer_config.json", config.get("chat_template")),
        ("chat_template.json", _read_object(folder / "chat_template.json").get("chat_template")),
    ):
        if isinstance(declared, str):
            templates["default"] = declared
        elif isinstance(declared, list):
            for entry in declared:
                if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                    raise LoadError(f"{where}: chat_template must be a string or a list of names and templates")
                templates[entry["name"]] = str(entry.get("template"))
        elif declared is not None:
            raise LoadError(f"{where}: chat_template must be a string or a list, got {type(declared).__name__}")
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            templates["default"] = jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"cannot read {jinja.name}: {error}") from error
    return templates
