"""Every sampling setting, many requests in one batch, against the naive model that recomputes everything."""

import json
import pathlib
import random

import numpy as np
import pytest

from octavo.engine.core import EngineCore
from octavo.engine.request import Request
from tests.references import naive
from tests.references.engine_runs import Run, request, run
from tests.references.naive_sampling import NaiveParams
from tests.references.tiny_models import BY_NAME, VOCAB_SIZE, make_weights

LENGTH = 12
EOS = 290
NAMES = {"bad_words_token_ids": "bad_words"}
SETTINGS: tuple[dict, ...] = (
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.8},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {5: 2.0, 300: 1.5, 17: -100.0}},
    {"logit_bias": {5: 100.0}, "frequency_penalty": 2.0},
    {"allowed_token_ids": [20, 30, 40, 50, 319]},
    {"allowed_token_ids": [20, 30, 40], "repetition_penalty": 2.0},
    {"bad_words_token_ids": [[20], [30, 40], [40, 50], [50, 20, 30]], "allowed_token_ids": [20, 30, 40, 50]},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.6, "seed": 2, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.7},
    {"temperature": 2.0, "seed": 4, "min_p": 0.3},
    {"temperature": 1.0, "seed": 2**32 - 1, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.8},
    {"temperature": 0.9, "seed": 7, "allowed_token_ids": list(range(100, 140)), "logit_bias": {120: 3.0}, "top_k": 9},
    {"temperature": 1.0, "seed": 8, "min_p": 1.0},
    {"temperature": 5.0, "seed": 9, "top_p": 1e-9},
    {"ignore_eos": False, "logit_bias": {EOS: 100.0}},
    {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "min_tokens": 4},
    {"logit_bias": {EOS: 100.0}, "min_tokens": 4},
    {"stop_token_ids": [7], "logit_bias": {7: 100.0}, "min_tokens": LENGTH},
    {"stop_token_ids": [7, 9], "logit_bias": {9: 100.0}, "min_tokens": 3, "temperature": 1.0, "seed": 10},
)


def make_requests() -> list[Request]:
    rng = random.Random(3)
    return [
        request(
            f"r{i}",
            [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randrange(3, 40))],
            eos=(EOS,),
            max_tokens=LENGTH,
            **settings,
        )
        for i, settings in enumerate(SETTINGS)
    ]


def naive_params(index: int) -> NaiveParams:
    settings = {NAMES.get(name, name): value for name, value in SETTINGS[index].items()}
    eos = () if settings.pop("ignore_eos", True) else (EOS,)
    stops = tuple(settings.pop("stop_token_ids", ()))
    return NaiveParams(max_tokens=LENGTH, eos_ids=eos, stop_token_ids=stops, **settings)


def check(core: EngineCore, model: naive.NaiveModel) -> None:
    """All requests at once: the same tokens, and raw log-probabilities of them."""
    requests = make_requests()
    results = run(core, requests)
    for index, item in enumerate(requests):
        result: Run = results[(item.request_id, 0)]
        expected = naive.generate(model, item.prompt_token_ids, naive_params(index))
        assert result.token_ids == expected.token_ids, SETTINGS[index]
        assert result.finish_reason == expected.finish_reason, SETTINGS[index]
        for step, token in enumerate(result.token_ids):
            logprobs, entry = expected.logprobs[step], result.logprobs[step]
            assert entry.logprob == pytest.approx(logprobs[token], abs=2e-3)
            assert entry.rank == pytest.approx(1 + int(np.sum(logprobs > logprobs[token])), abs=1)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_sampling_equals_the_naive_loop(make_core, name: str) -> None:
    check(make_core(name), naive.NaiveModel(BY_NAME[name].config, make_weights(name)))


def test_settings_survive_preemption(make_core, checkpoint) -> None:
    """A pool that holds hardly one full sequence: what penalties, bans and seeds remember is rebuilt."""
    core = make_core(num_gpu_blocks_override=8, warmup="progressive")
    config = json.loads((pathlib.Path(checkpoint()) / "config.json").read_text())
    check(core, naive.NaiveModel(config, make_weights("llama-gqa")))
    assert core.scheduler.stats.num_preemptions > 0
