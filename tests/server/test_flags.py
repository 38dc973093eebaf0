"""Flags from dataclasses."""

import argparse
import dataclasses

import pytest

from octavo.configs.engine import EngineConfig
from octavo.server.flags import add_config_flags, attribute_texts, from_flags

MODEL = frozenset({"model"})


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser, EngineConfig, skip=MODEL)
    return EngineConfig(model="m", **from_flags(parser.parse_args(arguments), EngineConfig, MODEL))


def test_defaults_are_the_dataclass() -> None:
    assert parse() == EngineConfig(model="m")


def test_every_type() -> None:
    config = parse(
        *("--dtype", "float32", "--max-model-len", "64", "--gpu-memory-utilization", "0.5"),
        *("--decode-rungs", "1,4", "--no-enable-prefix-caching", "--hf-overrides", '{"rope_theta": 5}'),
    )
    assert (config.dtype, config.max_model_len, config.gpu_memory_utilization) == ("float32", 64, 0.5)
    assert (config.decode_rungs, config.enable_prefix_caching) == ((1, 4), False)
    assert config.hf_overrides == {"rope_theta": 5}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--unknown", "1"],
        ["--max-model", "64"],
        ["--max-model-len", "x"],
        ["--decode-rungs", "1;4"],
        ["--hf-overrides", "[1]"],
        ["--hf-overrides", "{"],
    ],
)
def test_refusals(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_every_option_has_a_text() -> None:
    texts = attribute_texts(EngineConfig.__doc__ or "")
    assert {field.name for field in dataclasses.fields(EngineConfig)} == set(texts)
    assert all(text.endswith((".", ";")) or text for text in texts.values())


def test_defaults_may_be_replaced() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, EngineConfig, skip=MODEL, defaults={"seed": 9})
    assert parser.parse_args([]).seed == 9
    assert "(default: 9)" in parser.format_help()


def test_several_strings() -> None:
    @dataclasses.dataclass
    class Names:
        """Attributes:
        names: some.
        """

        names: tuple[str, ...] = ("default",)

    parser = argparse.ArgumentParser()
    add_config_flags(parser, Names, aliases={"names": ("--called",)})
    assert parser.parse_args([]).names == ("default",)
    given = parser.parse_args(["--names", "a", "b", "--called", "c", "--names", '["d", "e"]'])
    assert given.names == ("a", "b", "c", "d", "e")
    assert parser.parse_args(["--names", "a"]).names == ("a",)  # nothing is left from before
    add_config_flags(other := argparse.ArgumentParser(), Names, only_given=True)
    assert not vars(other.parse_args([]))
    assert "(default: default)" in other.format_help()


def test_a_type_without_a_spelling() -> None:
    @dataclasses.dataclass
    class Odd:
        field: list[str] | None = None

    with pytest.raises(TypeError, match="no flag"):
        add_config_flags(argparse.ArgumentParser(), Odd)
