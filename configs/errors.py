"""Errors that every room may raise; `engine/errors.py` draws the whole tree."""


class OctavoError(Exception):
    """Every error that Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An option, or a combination of options, that cannot work."""


class LoadError(OctavoError, ValueError):
    """A checkpoint, tokenizer or chat template that cannot be used."""
