"""What a request must satisfy before it may wait: every refusal names field and limit."""

import dataclasses

import pytest

from octavo.configs.errors import ConfigError
from octavo.configs.scheduler import SchedulerConfig
from octavo.engine.admission import level_of
from octavo.engine.buckets import VARIANTS
from octavo.engine.errors import RequestError
from octavo.engine.request import Request, SamplingParams
from tests.references.fake_device import VOCAB
from tests.references.fake_engine import long, make, tokens


@pytest.mark.parametrize(
    ("prompt", "params", "field", "part"),
    [
        ([], {}, "prompt", "at least one token"),
        ([1, -1], {}, "prompt", "-1"),
        ([VOCAB], {}, "prompt", str(VOCAB)),
        ([5279552648203111001], {}, "prompt", "5279552648203111001"),
        ([1.5], {}, "prompt", "1.5"),
        ([True], {}, "prompt", "True"),
        ([1, "a"], {}, "prompt", "'a'"),
        ([[-1]], {}, "prompt", "-1"),
        ([1] * 65, {}, "prompt", "64"),
        ([1] * 60, {"max_tokens": 5}, "max_tokens", "65 tokens"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids", str(VOCAB)),
        ([1], {"stop_token_ids": [2**31]}, "stop_token_ids", str(2**31)),
        ([1], {"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids", str(VOCAB)),
        ([1], {"logit_bias": {191222: -100}}, "logit_bias", "191222"),
        ([1], {"logprobs": 4}, "logprobs", "3"),
        ([1], {"logprobs": 10**6}, "logprobs", "3"),
        ([1], {"prompt_logprobs": 4}, "prompt_logprobs", "3"),
        ([1], {"allowed_token_ids": [7], "min_tokens": 1}, "allowed_token_ids", "mask"),
    ],
)
def test_refuses_with_field_and_limit(prompt: list, params: dict, field: str, part: str) -> None:
    engine = make()
    with pytest.raises(RequestError) as refusal:
        engine.add("a", prompt, **params)
    assert refusal.value.field == field
    assert part in str(refusal.value)
    assert not engine.scheduler.has_unfinished


def test_refuses_what_the_pool_can_never_hold() -> None:
    engine = make(blocks=5)
    with pytest.raises(RequestError, match="need 6 blocks of 4 tokens, the pool has 5"):
        engine.add("a", tokens(10), **long(12))
    engine.add("b", tokens(10), **long(11))  # the last token needs no KV
    engine.run()
    engine.check_outputs()


def test_refuses_masks_that_leave_nothing() -> None:
    engine = make()
    params = SamplingParams(allowed_token_ids=[3, 4])
    request = Request(request_id="a", prompt_token_ids=[1], params=params, bad_words_token_ids=[[3], [4], [5, 6]])
    with pytest.raises(RequestError, match="mask every token"):
        engine.scheduler.check(request)
    everything = Request(
        request_id="a", prompt_token_ids=[1], params=SamplingParams(), bad_words_token_ids=[[t] for t in range(VOCAB)]
    )
    with pytest.raises(RequestError, match="mask every token"):
        engine.scheduler.check(everything)


@pytest.mark.parametrize("word", [[], [VOCAB], [-1], list(range(17))])
def test_refuses_bad_words(word: list[int]) -> None:
    request = Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(), bad_words_token_ids=[word])
    with pytest.raises(RequestError) as refusal:
        make().scheduler.check(request)
    assert refusal.value.field == "bad_words"


def test_too_many_stop_ids_count_with_eos() -> None:
    params = SamplingParams(stop_token_ids=list(range(60)) * 2)
    make().scheduler.check(Request(request_id="a", prompt_token_ids=[1], params=params, eos_token_ids=(7,)))
    config = dataclasses.replace(make().scheduler.config, vocab_size=1000)
    engine = make(vocab_size=config.vocab_size)
    request = Request(
        request_id="a",
        prompt_token_ids=[1],
        params=SamplingParams(stop_token_ids=list(range(128))),
        eos_token_ids=(900,),
    )
    with pytest.raises(RequestError, match="129 ids, at most 128"):
        engine.scheduler.check(request)


def test_a_live_request_id_is_refused_and_free_again_after_an_abort() -> None:
    engine = make()
    engine.add("a", tokens(5), **long())
    with pytest.raises(RequestError, match="in use"):
        engine.add("a", tokens(5), **long())
    engine.step()
    engine.step()
    engine.abort("a")
    engine.events.clear()
    engine.add("a", tokens(9, seed=1), **long())
    engine.run()
    engine.check_outputs()  # nothing of the first one's step in flight is in it


def test_bad_config_is_refused() -> None:
    good = {
        "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "vocab_size": 9,
        "max_constrained_rows": 4,
    }  # fmt: skip
    SchedulerConfig(**good)
    for change in (
        {"max_num_seqs": 0}, {"max_num_batched_tokens": 4}, {"policy": "lifo"}, {"watermark": 1.0},
        {"watermark": float("nan")}, {"watermark": 10**400}, {"max_constrained_rows": -1}, {"vocab_size": 9.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            SchedulerConfig(**{**good, **change})


@pytest.mark.parametrize("cuts_are_plain", [False, True])
def test_what_a_request_needs_of_a_program(cuts_are_plain: bool) -> None:
    """Cuts are plain where the sampler says so; what changes logits never is."""

    def level(**params: object) -> str:
        request = Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=1, **params))
        return VARIANTS[level_of(request, cuts_are_plain)]

    assert level() == level(temperature=0, top_k=5) == level(temperature=0.7) == "plain"
    assert level(top_k=5) == level(top_p=0.9) == level(min_p=0.1) == ("plain" if cuts_are_plain else "full")
    assert level(logit_bias={1: 1.0}) == level(top_k=5, min_tokens=1) == level(presence_penalty=1.0) == "full"
    assert level(logprobs=1, top_k=5) == "logprobs"
