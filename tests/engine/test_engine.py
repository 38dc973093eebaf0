"""The offline facade on scripted models: B1, B2, B5, B7 and B8 of the failure cases, through the real engine."""

import pathlib
from collections.abc import Iterator

import pytest

from octavo.configs.engine import EngineConfig
from octavo.engine import ConfigError, Engine, EngineDeadError, RequestError, SamplingParams, startup
from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.table_model import EOS, TableModel, chain

OPTIONS = {
    "progress": False,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 64,
    "decode_rungs": (4,),
    "token_rungs": (48,),
    "max_logprobs": 5,
    "warmup": "full",
}
A, B, C = byte_ids("abc")
# a -> "ObSer" -> "Observ" -> "ation" -> ":" -> " the" -> EOS;  b -> half emoji -> its end -> "\n" … ;  c -> c -> c
SCRIPT = {
    **chain(A, *(piece_id(p) for p in (b"ObSer", b"Observ", b"ation")), *byte_ids(":"), piece_id(b" the"), EOS),
    **chain(B, piece_id(b"\xf0\x9f"), piece_id(b"\x99\x82"), *byte_ids("\n"), piece_id(b"hello"), EOS),
    C: {C: 20.0, A: 15.0, piece_id(b"\xc4\x8f"): 14.0},
    **chain(*byte_ids("\n"), piece_id(b"hello")),
}
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    generation_config = {"temperature": 0.5, "max_new_tokens": 7, "eos_token_id": [EOS]}
    return TableModel(table=SCRIPT, generation_config=generation_config).write(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def engine(model: pathlib.Path) -> Iterator[Engine]:
    with Engine(str(model), **OPTIONS) as engine:
        yield engine


def test_prompts_of_every_form(engine: Engine) -> None:
    params = SamplingParams(**GREEDY)
    as_text, as_ids, as_mapping, as_id_mapping = engine.generate(
        ["a", [A], {"prompt": "a"}, {"prompt_token_ids": [A], "cache_salt": "x"}], params, use_tqdm=False
    )
    assert as_text.outputs[0].text == "ObSerObservation: the"
    assert as_text.outputs[0].finish_reason == "stop"
    assert as_text.outputs[0].token_ids[-1] == EOS
    assert (as_text.prompt, as_text.prompt_token_ids) == ("a", [A])
    assert (as_ids.prompt, as_ids.outputs) == (None, as_text.outputs)
    assert as_mapping.outputs == as_id_mapping.outputs == as_text.outputs
    (alone,) = engine.generate([A], params, use_tqdm=False)
    assert alone.outputs == as_text.outputs


def test_results_are_in_order_with_params_for_each(engine: Engine) -> None:
    """B057; more prompts than rows."""
    prompts = ["a", "b", "c"] * 3
    params = [SamplingParams(**GREEDY, max_tokens=1 + i % 5) for i in range(9)]
    results = engine.generate(prompts, params, use_tqdm=False)
    assert [r.prompt for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == [1 + i % 5 for i in range(9)]
    assert results[3].outputs[0].text == "ObSerObservation:"


@pytest.mark.parametrize("stop", ["Observation:", ["zzz", "tion"], [": t"]])
def test_stop_strings(engine: Engine, stop: str | list[str]) -> None:
    """B001 through the engine: streamed and whole texts agree."""
    params = SamplingParams(**GREEDY, stop=stop)
    (result,) = engine.generate("a", params, use_tqdm=False)
    text = "ObSerObservation: the"
    wanted = stop if isinstance(stop, str) else stop[-1]
    assert result.outputs[0].text == text[: text.index(wanted)]
    assert result.outputs[0].stop_reason == wanted
    pieces = list(engine.stream("a", params))
    assert "".join(p.text for p in pieces) == result.outputs[0].text
    assert [i for p in pieces for i in p.token_ids] == result.outputs[0].token_ids
    assert [p.finish_reason for p in pieces][-1] == "stop"
    assert all(p.finish_reason is None for p in pieces[:-1])


def test_split_characters_stream_whole(engine: Engine) -> None:
    """B010"""
    assert [p.text for p in engine.stream("b", SamplingParams(**GREEDY))] == ["", "🙂", "\n", "hello", ""]
    (cut,) = engine.generate("b", SamplingParams(**GREEDY, max_tokens=1), use_tqdm=False)
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("\ufffd", "length")


def test_a_sample_with_a_stop_string_leaves_the_others(engine: Engine) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=3, max_tokens=30, stop=["ď"], ignore_eos=True)
    (result,) = engine.generate("c", params, use_tqdm=False)
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert all(o.finish_reason in ("stop", "length") for o in result.outputs)
    assert result.finished
    streamed = ["", "", ""]
    for piece in engine.stream("c", params):
        streamed[piece.index] += piece.text
    assert streamed == [o.text for o in result.outputs]


def test_logprobs(engine: Engine) -> None:
    params = SamplingParams(**GREEDY, max_tokens=2, logprobs=2, prompt_logprobs=1)
    (result,) = engine.generate("cc", params, use_tqdm=False)
    sample = result.outputs[0]
    assert sample.logprobs is not None
    assert [list(table) for table in sample.logprobs] == [[C, A]] * 2
    assert [table[C].decoded_token for table in sample.logprobs] == ["c", "c"]
    assert sample.cumulative_logprob == pytest.approx(sum(table[C].logprob for table in sample.logprobs))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert list(result.prompt_logprobs[1] or {}) == [C]


def test_bad_words_are_tokenised(engine: Engine) -> None:
    (result,) = engine.generate("c", SamplingParams(**GREEDY, max_tokens=2, bad_words=["c"]), use_tqdm=False)
    assert result.outputs[0].token_ids[0] == A


def test_defaults(engine: Engine) -> None:
    params = engine.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.5, 7)
    (result,) = engine.generate("c", use_tqdm=False)
    assert len(result.outputs[0].token_ids) <= 7
    (result,) = engine.generate("c", SamplingParams(**GREEDY, max_tokens=None), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == engine.max_model_len - 1


def test_chat(engine: Engine) -> None:
    params = SamplingParams(**GREEDY, max_tokens=3)
    messages = [{"role": "user", "content": "b"}]
    (result,) = engine.chat(messages, params, use_tqdm=False)
    assert result.prompt == "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert result.prompt_token_ids[0] == 3
    assert result.outputs[0].text == "hello"
    two = engine.chat([messages, messages], params, use_tqdm=False)
    assert [r.outputs for r in two] == [result.outputs] * 2
    continued = [*messages, {"role": "assistant", "content": "a"}]
    (result,) = engine.chat(continued, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert result.outputs[0].text == "ObSerObservation", "only what is new (B061)"
    (result,) = engine.chat(messages, params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert result.prompt == "b"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "must not be empty"),
        ([[]], "at least one token"),
        ([""], "at least one token"),
        ([-1], "-1"),
        ([320], "320"),
        ([5279552648203111001], "5279552648203111001"),
        ([[-1]], "-1"),
        ([1.5], "integer token ids"),
        ([True], "integer token ids"),
        ([1, "a"], "integer token ids"),
        (["a", [1, "a"]], "integer token ids"),
        (None, "must be text"),
        (5, "must be text"),
        (["a", None], "must be text"),
        ({"text": "a"}, "unknown key 'text'"),
        ({}, "exactly one"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ("a" * 128, "max_model_len"),
    ],
)
def test_prompts_that_are_refused(engine: Engine, prompt: object, message: str) -> None:
    """B054, B055: nothing runs, and the engine goes on."""
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, SamplingParams(**GREEDY), use_tqdm=False)  # type: ignore[arg-type]
    assert not engine.core.has_unfinished


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=6),
        SamplingParams(stop_token_ids=[320]),
        SamplingParams(min_tokens=200, max_tokens=None),
        [SamplingParams()] * 3,
        "greedy",
    ],
)
def test_one_wrong_request_and_none_runs(engine: Engine, params: object) -> None:
    each = [SamplingParams(), params] if isinstance(params, SamplingParams) else params
    with pytest.raises(RequestError):
        engine.generate(["a", "b"], each, use_tqdm=False)  # type: ignore[arg-type]
    assert not engine.core.has_unfinished
    with pytest.raises(RequestError):
        engine.generate(["a"], [SamplingParams()], use_tqdm=False, priority=[1, 2])


def test_a_closed_stream_ends_its_request(engine: Engine) -> None:
    stream = engine.stream("c", SamplingParams(**GREEDY, max_tokens=100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine.step()
    engine.step()
    assert not engine.core.has_unfinished


def test_a_wrong_stream_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        engine.stream([320])


def test_streams_beside_each_other(engine: Engine) -> None:
    params = SamplingParams(**GREEDY)
    first, second = engine.stream("a", params), engine.stream("b", params)
    texts = ["", ""]
    texts[0] += next(first).text
    (whole,) = engine.generate("c", SamplingParams(**GREEDY, max_tokens=3), use_tqdm=False)
    for a, b in zip(first, second, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    texts[1] += "".join(p.text for p in second)
    texts[0] += "".join(p.text for p in first)
    assert texts == ["ObSerObservation: the", "🙂\nhello"]
    assert whole.outputs[0].text == "ccc"


def test_an_interrupt_ends_what_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = engine.core.step, []

    def interrupted() -> list:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["c", "c"], SamplingParams(**GREEDY, max_tokens=100), use_tqdm=False)
    monkeypatch.undo()
    engine.step()
    engine.step()
    assert not engine.core.has_unfinished


def test_the_prefix_cache_can_be_reset(engine: Engine) -> None:
    params = SamplingParams(**GREEDY, max_tokens=1)
    prompt = "a" * 40
    engine.generate(prompt, params, use_tqdm=False)
    (again,) = engine.generate(prompt, params, use_tqdm=False)
    assert again.num_cached_tokens == 32
    assert engine.reset_prefix_cache()
    (fresh,) = engine.generate(prompt, params, use_tqdm=False)
    assert fresh.num_cached_tokens == 0
    assert fresh.outputs == again.outputs


def test_options(model: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="unknown option max_len"):
        Engine(str(model), max_len=5)


@pytest.mark.parametrize(
    ("model_defaults", "options", "message"),
    [
        ({}, {"override_generation_config": {"temperature": -1}}, "override_generation_config sets temperature"),
        ({}, {"override_generation_config": {"temperature": "x"}}, "override_generation_config sets temperature"),
        ({}, {"override_generation_config": {"max_new_tokens": "x"}}, "override_generation_config sets max_new_tokens"),
        ({"top_p": 7}, {"override_generation_config": {"top_k": 5}}, "generation_config.json sets top_p"),
        ({}, {"compilation_cache_dir": "/dev/null/x"}, "compilation_cache_dir '/dev/null/x' cannot be made"),
    ],
    ids=str,
)
def test_options_are_refused_before_the_weights_are_read(
    model_defaults: dict, options: dict, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TableModel(table=SCRIPT, generation_config=model_defaults).write(tmp_path / "table")
    monkeypatch.delattr(startup, "load_model")
    with pytest.raises(ConfigError, match=f"^{message}"):
        Engine(str(model), **OPTIONS, **options)


def test_without_a_place_for_compiled_programs_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/dev/null/octavo")
    assert startup._cache_dir(EngineConfig(model="m")) is None
    assert "/dev/null/octavo/programs" in caplog.text


def test_close_twice(model: pathlib.Path) -> None:
    engine = Engine(str(model), **OPTIONS)
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("a", use_tqdm=False)


def test_outputs_of_requests_added_before_are_kept(engine: Engine) -> None:
    """`generate` and `stream` run the engine for everybody; what is not theirs waits for `step`."""
    params = SamplingParams(**GREEDY, max_tokens=2)
    mine = [engine.add_request("c", params), engine.add_request("c", params)]
    engine.generate("a", SamplingParams(**GREEDY, max_tokens=9), use_tqdm=False)
    assert len(list(engine.stream("b", SamplingParams(**GREEDY, max_tokens=5)))) == 5
    _, outputs = engine.step()
    assert [output.request_id for output in outputs] == mine
    assert all(output.outputs[0].token_ids == [C, C] for output in outputs)


def test_aborting_a_stream_ends_it(engine: Engine) -> None:
    stream = engine.stream("c", SamplingParams(**GREEDY, max_tokens=50))
    first = next(stream)
    engine.abort(first.request_id)
    rest = list(stream)
    assert rest[-1].finish_reason == "abort"
    assert 1 + len(rest) < 50


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda e: e.chat({"role": "user", "content": "x"}), "messages"),
        (lambda e: e.chat(5), "messages"),
        (lambda e: e.stream("a", "greedy"), "params"),
        (lambda e: e.add_request("a", 5), "params"),
        (lambda e: e.generate("a", {"temperature": 0}), "params"),
        (lambda e: e.generate("a", SamplingParams(), priority=3), "priority"),
    ],
    ids=["chat-object", "chat-number", "stream-params", "add-params", "dict-params", "priority"],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(engine: Engine, call, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        call(engine)
    assert caught.value.field == field


def test_unknown_sampling_defaults_are_refused(model: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="temprature"):
        Engine(str(model), **OPTIONS, override_generation_config={"temprature": 1})


def test_what_a_request_brings_is_refused_as_the_requests_fault(engine: Engine) -> None:
    """A template or a prompt that cannot be, by field; a prompt of megabytes before it is tokenised."""
    with pytest.raises(RequestError) as caught:
        engine.chat([{"role": "user", "content": "x"}], chat_template="{% for %}")
    assert caught.value.field == "chat_template"
    for call in (engine.generate, engine.stream, engine.add_request):
        with pytest.raises(RequestError, match="limit of 128 tokens"):
            call("a" * 10_000_000)
