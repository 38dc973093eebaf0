"""The naive model against transformers, and the goldens against a model that ignores what they are about."""

import dataclasses

import numpy as np
import pytest

from tests.references import naive, tiny_models
from tests.references.goldens import tiny_golden
from tests.references.naive_sampling import NaiveParams, constrain, truncate

TOLERANCE = 1e-4


@pytest.mark.golden
@pytest.mark.parametrize("tiny", tiny_models.MODELS, ids=lambda tiny: tiny.name)
def test_naive_equals_transformers(tiny: tiny_models.TinyModel) -> None:
    golden = tiny_golden(tiny)
    assert golden.prompt == tiny_models.make_prompt(tiny)
    model = naive.NaiveModel(tiny.config, tiny_models.make_weights(tiny.name))
    ids = golden.prompt + golden.output
    logprobs = naive.prompt_logprobs(model, ids)
    chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(chosen, golden.chosen[1:], atol=TOLERANCE)
    top = np.take_along_axis(logprobs, golden.top_ids[1:], axis=-1)
    np.testing.assert_allclose(top, golden.top_logprobs[1:], atol=TOLERANCE)


@pytest.mark.golden
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-tied"])
def test_naive_generates_the_golden(name: str) -> None:
    golden = tiny_golden(tiny_models.BY_NAME[name])
    model = naive.NaiveModel(tiny_models.BY_NAME[name].config, tiny_models.make_weights(name))
    output = naive.generate(model, golden.prompt, NaiveParams(max_tokens=len(golden.output)))
    assert output.token_ids == golden.output
    assert output.finish_reason == "length"


WRONG = {
    "llama-linear-old": {"rope_scaling": None},
    "llama-linear-new": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "llama-llama3-old": {"rope_scaling": None},
    "llama-llama3-new": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "llama-yarn-old": {"rope_scaling": None},
    "llama-yarn-mscale": {"rope_parameters": {"mscale": None}},
    "llama-yarn-attention-factor": {"rope_parameters": {"attention_factor": None}},
    "llama-yarn-no-original": {"rope_scaling": {"original_max_position_embeddings": 64}},
    "llama-mha": {"rope_theta": 20000.0},
    "qwen3": {"rope_theta": 10000.0},
    "qwen3-yarn": {"rope_scaling": None},
    "mistral-new": {"rope_parameters": {"rope_theta": 10000.0}},
}


@pytest.mark.golden
@pytest.mark.parametrize("name", WRONG)
def test_goldens_notice_a_wrong_rope(name: str) -> None:
    """Each setting moves some log-probability by more than any test's tolerance (0.05 in bfloat16)."""
    tiny = tiny_models.BY_NAME[name]
    golden = tiny_golden(tiny)
    config = dict(tiny.config)
    for key, value in WRONG[name].items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    model = naive.NaiveModel(config, tiny_models.make_weights(name))
    ids = golden.prompt + golden.output
    chosen = naive.prompt_logprobs(model, ids)[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(chosen - golden.chosen[1:]).max() > 0.1


def test_weights_are_the_same_everywhere() -> None:
    weight = tiny_models.make_weights("llama-gqa")["model.layers.0.self_attn.q_proj.weight"]
    assert weight[0, :3].tolist() == [-0.08349609375, 0.046142578125, -0.10302734375]
    assert 0.095 < weight.std() < 0.105


def test_penalties_bias_and_bans_by_hand() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, 3.0], np.float32)
    params = NaiveParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={3: 4.0})
    x = constrain(logits, [1], [0, 0], params)
    np.testing.assert_allclose(x, [2.0 / 2 - 2 * 0.25 - 0.5, -2.0, 0.5, 4.0, 3.0])
    banned = dataclasses.replace(params, bad_words=[[0, 3], [1, 4]], allowed_token_ids=[2, 3, 4])
    x = constrain(logits, [1], [0, 0], banned)
    assert np.isneginf(x).tolist() == [True, True, False, True, False]
    early = dataclasses.replace(banned, min_tokens=3, eos_ids=(4,))
    assert int(np.argmax(constrain(logits, [1], [0, 0], early))) == 2
    nothing_left = dataclasses.replace(early, allowed_token_ids=[4])
    assert np.isfinite(constrain(logits, [1], [0, 0], nothing_left)).tolist() == [False] * 4 + [True]


def test_truncation_by_hand() -> None:
    x = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))

    def left(**options: float) -> list[int]:
        return np.flatnonzero(np.isfinite(truncate(x, NaiveParams(temperature=1.0, **options)))).tolist()

    assert left(top_k=2) == [0, 1]
    assert left(top_k=9) == [0, 1, 2, 3]
    assert left(top_p=0.65) == [0, 1]
    assert left(top_p=1e-9) == [0]
    assert left(top_k=3, top_p=0.7) == [0, 1]  # of 0.9: 0.44 and 0.33
    assert left(min_p=0.6) == [0, 1]
    assert left(min_p=1.0) == [0]
