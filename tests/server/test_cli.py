"""The commands, on a scripted model."""

import io
import json
import pathlib
import subprocess
import sys

import pytest

from octavo.server.cli import main
from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.table_model import EOS, TableModel, chain

SMALL = ["--max-model-len", "96", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
SMALL += ["--num-gpu-blocks-override", "32", "--decode-rungs", "2", "--token-rungs", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # "a" continues with "hello world"; an assistant's turn (after "\n") says "Paris is".
    table = {
        **chain(*byte_ids("a"), piece_id(b"hello"), piece_id(b" world"), EOS),
        **chain(*byte_ids("\n"), piece_id(b"Pari"), piece_id(b"s is"), EOS),
    }
    return str(TableModel(table=table).write(tmp_path_factory.mktemp("cli")))


class Pipe(io.StringIO):
    """Standard input that is no terminal."""


def test_generate_streams_one_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "a", "--temperature", "0", *SMALL]) == 0
    assert capsys.readouterr().out == "hello world\n"


def test_generate_reads_a_pipe(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe("a"))
    assert main(["generate", model, "--temperature", "0", "--stop", "wor", *SMALL]) == 0
    assert capsys.readouterr().out == "hello \n"


def test_generate_several(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "a", "--prompt", "ba", "--temperature", "0", "--max-tokens", "1", *SMALL]) == 0
    assert capsys.readouterr().out == "> a\nhello\n\n> ba\nhello\n\n"


def test_chat_from_a_pipe(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that does not fit is refused, and /reset makes room."""
    monkeypatch.setattr(sys, "stdin", Pipe("Hi\n\n/help\nagain\n" + "x" * 90 + "\n/reset\nanew\n/exit\nnever\n"))
    assert main(["chat", model, "--temperature", "0", "--max-tokens", "4", *SMALL]) == 0
    answer, helped, second, refused, anew = capsys.readouterr().out.splitlines()
    assert answer == second == anew == "Paris is"
    assert helped.startswith("/reset")
    assert "max_model_len" in refused


def test_errors_are_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model + "-missing", "a"]) == 1
    assert main(["generate", model, "a", "--top-p", "2", *SMALL]) == 1
    first, second = (line for line in capsys.readouterr().err.splitlines() if line.startswith("octavo:"))
    assert "missing" in first
    assert "top_p" in second


@pytest.mark.parametrize(
    "arguments",
    [[], ["serve-nothing"], ["generate"], ["generate", "m", "--nonsense"], ["bench", "latency", "m", "--num"]],
)
def test_unknown_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: octavo" in capsys.readouterr().err


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["jax"].startswith("0.")
    assert {"devices", "cache", "platform", "commit", "octavo"} <= set(lines)


def test_bench_throughput(model: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--num-prompts", "5", "--random-range", "3", "9", "--load-format", "dummy", "--json", str(file)]
    assert main(["bench", "throughput", model, *sizes, *SMALL]) == 0
    report = json.loads(file.read_text())
    results = report["results"]
    assert 15 <= results["num_input_tokens"] <= 45
    assert 15 <= results["num_output_tokens"] <= 45
    assert results["num_cached_tokens"] == 0
    assert results["output_tokens_per_s"] > 0
    assert report["options"]["enable_prefix_caching"] is False
    assert report["workload"]["input_len"] == [3, 9]
    assert report["environment"]["jax"]
    assert "output_tokens_per_s" in capsys.readouterr().out


def test_bench_latency(model: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "out.json"
    sizes = ["--batch-size", "2", "--input-len", "20", "--output-len", "5", "--num-iters", "2", "--json", str(file)]
    assert main(["bench", "latency", model, *sizes, "--num-iters-warmup", "1", *SMALL]) == 0
    results = json.loads(file.read_text())["results"]
    assert results["num_cached_tokens"] == 0
    assert 0 < results["time_to_first_token_ms_mean"] < results["latency_ms_mean"]
    assert results["time_per_output_token_ms_p50"] <= results["time_per_output_token_ms_p99"]
    assert results["start_to_ready_s"] > 0


def test_bench_with_a_config_alone(model: str, tmp_path: pathlib.Path) -> None:
    """As in benchmarks/models: no weights, no tokenizer."""
    (tmp_path / "config.json").write_text((pathlib.Path(model) / "config.json").read_text())
    sizes = ["--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--load-format", "dummy"]
    assert main(["bench", "throughput", str(tmp_path), *sizes, *SMALL]) == 0


def test_help_imports_no_jax() -> None:
    code = "import sys; from octavo.server.cli import make_parser; make_parser(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
