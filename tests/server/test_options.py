"""`octavo serve`: its flags, a TOML file, and which of them wins."""

import argparse
import dataclasses
import pathlib
import re

import pytest

from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig
from octavo.server.cli import main
from octavo.server.flags import attribute_texts, flag_of
from octavo.server.options import ALIASES, add_serve_flags, read_options


def read(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    return read_options(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)


@pytest.fixture
def write(tmp_path: pathlib.Path):
    def write(text: str) -> str:
        path = tmp_path / "serve.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_defaults_are_the_dataclasses() -> None:
    assert read("m") == (EngineConfig(model="m"), ServerConfig(served_model_name=("m",)))


def test_the_two_configurations_share_no_name() -> None:
    names = [field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    assert len(names) == len(set(names))
    assert "config" not in names


def test_vllms_names() -> None:
    engine, server = read(
        *("m", "--host", "0.0.0.0", "--port", "0", "--api-key", "k1", "k2", "--api-key", "k3"),
        *("--served-model-name", "a", "b c", "--max-model-len", "64", "--gpu-memory-utilization", "0.5"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--dtype", "float32", "--tokenizer", "t"),
        *("--generation-config", "vllm", "--override-generation-config", '{"temperature": 0.5}'),
        *("--no-enable-prefix-caching", "--seed", "7", "--uvicorn-log-level", "warning", "--root-path", "/api"),
        *("--allowed-origins", '["https://a.example", "https://b.example"]', "--allowed-methods", "GET", "POST"),
        *("--allowed-headers", "[]", "--allow-credentials", "--ssl-keyfile", "k", "--ssl-certfile", "c"),
        *("--ssl-ca-certs", "ca", "--ssl-cert-reqs", "2", "--max-num-queued-reqs", "9", "--drain-timeout", "3"),
        *("--disable-log-stats", "--h11-max-header-count", "30", "--disable-fastapi-docs"),
    )
    assert (engine.max_model_len, engine.gpu_memory_utilization, engine.max_num_seqs) == (64, 0.5, 4)
    assert (engine.dtype, engine.tokenizer, engine.enable_prefix_caching, engine.seed) == ("float32", "t", False, 7)
    assert (engine.generation_config, engine.override_generation_config) == ("vllm", {"temperature": 0.5})
    assert (server.host, server.port, server.api_key) == ("0.0.0.0", 0, ("k1", "k2", "k3"))
    assert (server.served_model_name, server.root_path) == (("a", "b c"), "/api")
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert (server.allowed_methods, server.allowed_headers) == (("GET", "POST"), ())
    assert (server.max_num_queued_reqs, server.drain_timeout, server.max_header_count) == (9, 3.0, 30)
    assert (server.ssl_cert_reqs, server.disable_log_stats, server.disable_fastapi_docs) == (2, True, True)


def test_a_file_under_the_command_line(write) -> None:
    path = write(
        """
        model = "from-file"
        port = 9000
        max-model-len = 64
        max_num_seqs = 4
        api-key = ["file"]
        served-model-name = "one"
        drain-timeout = 5
        enable-prefix-caching = false
        decode-rungs = [1, 4]
        h11-max-header-count = 40
        [override-generation-config]
        temperature = 0.5
        """
    )
    engine, server = read("--config", path)
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("from-file", 64, 4)
    assert (engine.enable_prefix_caching, engine.decode_rungs) == (False, (1, 4))
    assert engine.override_generation_config == {"temperature": 0.5}
    assert (server.port, server.served_model_name, server.drain_timeout) == (9000, ("one",), 5)
    assert server.max_header_count == 40
    engine, server = read("m", "--config", path, "--port", "1", "--api-key", "mine", "--enable-prefix-caching")
    assert (engine.model, engine.enable_prefix_caching, engine.max_model_len) == ("m", True, 64)
    assert (server.port, server.api_key) == (1, ("mine",))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-model-length = 4", "max-model-len"),
        ("prot = 4", "did you mean port"),
        ("[server]\nport = 1", "server"),
        ("port = 1\nport = 2", "not TOML"),
        ("max-model-len = 1\nmax_model_len = 2", "twice"),
        ("max-model-len = '64'", "max_model_len must be"),
        ("port = 80.5", "port must be"),
        ("enable-prefix-caching = 'no'", "enable_prefix_caching"),
        ("api-key = [1]", "api_key"),
        ("decode-rungs = ['a']", "decode_rungs"),
        ("config = 'x'", "config"),
        ("x = " + "[" * 5000, "not TOML"),
    ],
)
def test_files_that_are_refused(write, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        read("m", "--config", write(text))


def test_unreadable_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "latin").write_bytes(b"host = '\xff'")
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    for name, words in (("nowhere", "No such file"), ("latin", "UTF-8"), ("large", "more than"), (".", "directory")):
        for flag in ("--config", "--chat-template"):
            with pytest.raises(ConfigError, match=words) as error:
                read("m", flag, str(tmp_path / name))
            assert flag in str(error.value)


def test_the_chat_template_is_a_file_or_the_text(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}\n", encoding="utf-8")
    assert read("m", "--chat-template", str(path))[1].chat_template == "{{ messages }}\n"
    assert read("m", "--chat-template", "{{ x }}")[1].chat_template == "{{ x }}"


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "env,key")
    assert read("m")[1].api_key == ("env,key",)
    assert read("m", "--api-key", "k")[1].api_key == ("k", "env,key")


@pytest.mark.parametrize(
    "arguments", [["--unknown", "1"], ["--max-model", "64"], ["--port", "x"], ["--allowed-origins", "[1]"]]
)
def test_flags_that_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["serve", "m", *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 1
    assert main(["serve", "m", "--port", "70000"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "MODEL" in first
    assert "port must be between 0 and 65535, got 70000" in second


def test_every_option_has_a_text() -> None:
    texts = attribute_texts(ServerConfig.__doc__ or "")
    assert {field.name for field in dataclasses.fields(ServerConfig)} == set(texts)


def test_the_documentation_lists_every_option(repository: pathlib.Path) -> None:
    """docs/serving.md has one row a flag, with the default that the dataclass has."""
    rows = dict(
        re.findall(r"^\| `(--[\w-]+)`[^|]*\| ([^|]*?) *\|", (repository / "docs/serving.md").read_text(), re.MULTILINE)
    )
    for config in (ServerConfig, EngineConfig):
        for field in dataclasses.fields(config):
            if field.name == "model":
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            shown = "" if default in (None, (), {}, "") else f"`{documented(default)}`"
            assert rows.pop(flag_of(field.name), None) == shown, field.name
    assert rows.pop("--config") == ""
    assert not rows, "flags that do not exist"


def documented(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def test_aliases_are_fields() -> None:
    assert set(ALIASES) <= {field.name for field in dataclasses.fields(ServerConfig)}
