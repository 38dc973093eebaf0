"""The command line: octavo serve | generate | chat | bench | env.

Reads arguments and prints; everything else happens below. Refuses unknown options, and abbreviations
of known ones. The engine is imported only once a command needs it, so `--help` is quick.
"""

import argparse
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError, OctavoError
from octavo.server.flags import add_config_flags, from_flags
from octavo.server.options import add_serve_flags, read_options

if TYPE_CHECKING:
    from octavo.engine import Engine, SamplingParams

MODEL = frozenset({"model"})
BENCH_DEFAULTS = {"enable_prefix_caching": False, "warmup": "full"}
GENERATE_TOKENS = 256  # of `generate` by default, as far as they fit
SAMPLING = {
    "max_tokens": (int, "output tokens at most"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "in (0, 1]"),
    "top_k": (int, "0 is off"),
    "min_p": (float, "in [0, 1]"),
    "presence_penalty": (float, "in [-2, 2]"),
    "frequency_penalty": (float, "in [-2, 2]"),
    "repetition_penalty": (float, "1 is off"),
    "min_tokens": (int, "no end before as many tokens"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")  # to standard error
    logging.getLogger("octavo").setLevel(logging.INFO)
    try:
        return args.run(args) or 0
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`octavo … | head`); nothing can be said any more.
        sys.stderr.close()
        return 141


def make_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="octavo", description="An LLM serving engine in JAX.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    text = "serve a model over HTTP, with OpenAI's API"
    serve = commands.add_parser("serve", help=text, description=text, allow_abbrev=False)
    serve.set_defaults(run=run_serve)
    add_serve_flags(serve)

    generate = _command(commands, "generate", run_generate, "complete prompts and print the texts")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="by default standard input")
    generate.add_argument("--prompt", action="append", default=[], help="another prompt; may be repeated")
    _add_sampling_flags(generate)
    add_config_flags(generate, EngineConfig, skip=MODEL)

    chat = _command(commands, "chat", run_chat, "talk to a model; /reset forgets, /exit ends")
    chat.add_argument("--system", help="the system message")
    _add_sampling_flags(chat)
    add_config_flags(chat, EngineConfig, skip=MODEL)

    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    throughput = _command(kinds, "throughput", run_bench_throughput, "many requests at once: tokens a second")
    throughput.add_argument("--num-prompts", type=_positive, default=64)
    throughput.add_argument(
        "--random-range",
        type=_positive,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="uniform input and output lengths, instead of --input-len and --output-len",
    )
    _add_bench_flags(throughput, output_len=128, temperature=1.0)
    latency = _command(kinds, "latency", run_bench_latency, "one batch at a time: time to first token and per token")
    latency.add_argument("--batch-size", type=_positive, default=1)
    latency.add_argument("--num-iters", type=_positive, default=5)
    latency.add_argument("--num-iters-warmup", type=int, default=1)
    _add_bench_flags(latency, output_len=128, temperature=0.0)

    env = commands.add_parser("env", help="versions, devices and folders", allow_abbrev=False)
    env.set_defaults(run=run_env)
    return parser


def run_serve(args: argparse.Namespace) -> int:
    """Serves until a signal ends it or the engine dies; the exit status says which."""
    engine, server = read_options(args)
    from octavo.server.serve import serve

    return serve(engine, server)


def run_generate(args: argparse.Namespace) -> None:
    prompts = [*args.prompts, *args.prompt]
    _given_params(args)  # what is wrong with them should not wait for the model
    if not prompts:
        if sys.stdin.isatty():
            print("reading the prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
        prompts = [sys.stdin.read()]
    with _start(args) as engine:
        params = _sampling_params(args, engine, max_tokens=min(GENERATE_TOKENS, engine.max_model_len // 2))
        if len(prompts) == 1:
            for piece in engine.stream(prompts[0], params):
                print(piece.text, end="", flush=True)
            print()
            return
        for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
            print(f"> {prompt}\n{result.outputs[0].text}\n")


def run_chat(args: argparse.Namespace) -> None:
    from octavo.server.chat import talk

    _given_params(args)
    with _start(args) as engine:
        talk(engine, _sampling_params(args, engine, max_tokens=None), args.system, sys.stdin, sys.stdout)


def run_bench_throughput(args: argparse.Namespace) -> None:
    from octavo.server import bench

    low, high = args.random_range or (None, None)
    if low is not None and low > high:
        raise ConfigError(f"--random-range {low} {high}: the first must not be above the second")
    _writable(args.json)
    workload = bench.Throughput(
        num_prompts=args.num_prompts,
        input_len=(low or args.input_len, high or args.input_len),
        output_len=(low or args.output_len, high or args.output_len),
        temperature=args.temperature,
        seed=args.seed,
    )
    bench.run(workload, from_flags(args, EngineConfig), args.json)


def run_bench_latency(args: argparse.Namespace) -> None:
    from octavo.server import bench

    _writable(args.json)
    workload = bench.Latency(
        batch_size=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        num_iters=args.num_iters,
        num_iters_warmup=args.num_iters_warmup,
        temperature=args.temperature,
        seed=args.seed,
    )
    bench.run(workload, from_flags(args, EngineConfig), args.json)


def run_env(args: argparse.Namespace) -> None:
    from octavo.engine.environment import describe

    for name, value in describe().items():
        print(f"{name:<14}{value}")


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a directory, a .gguf file or a hub id")
    parser.set_defaults(run=run)
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "by default what the model's generation_config.json says")
    for name, (kind, text) in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    group.add_argument("--stop", action="append", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")


def _add_bench_flags(parser: argparse.ArgumentParser, output_len: int, temperature: float) -> None:
    parser.add_argument("--input-len", type=_positive, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=_positive, default=output_len, help="tokens of an output")
    parser.add_argument("--temperature", type=float, default=temperature)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    add_config_flags(parser, EngineConfig, skip=MODEL, defaults=BENCH_DEFAULTS)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


def _writable(path: str | None) -> None:
    """Refuses a file that could not be written, before minutes of measuring rather than after."""
    if path is not None and not pathlib.Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no such folder")


def _start(args: argparse.Namespace) -> "Engine":
    from octavo.engine import Engine

    return Engine(**from_flags(args, EngineConfig))


def _sampling_params(args: argparse.Namespace, engine: "Engine", max_tokens: int | None) -> "SamplingParams":
    """The model's defaults, `max_tokens`, and over these what was given."""
    import msgspec

    given = {"max_tokens": max_tokens, **_given_params(args)}
    return msgspec.structs.replace(engine.get_default_sampling_params(), **given)


def _given_params(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given.

    Raises:
      RequestError: a value out of its range.
    """
    from octavo.engine import SamplingParams

    values = vars(args)
    given = {name: values[name] for name in (*SAMPLING, "stop") if values[name] is not None}
    SamplingParams(**given)
    return {**given, "ignore_eos": args.ignore_eos}
