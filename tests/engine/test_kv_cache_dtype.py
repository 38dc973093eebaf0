"""kv_cache_dtype: an fp8 cache end to end, what it costs in memory, and what it changes."""

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError
from octavo.engine import Engine, SamplingParams, startup
from tests.engine.conftest import SMALL

PROMPTS = [list(range(3, 40)), list(range(50, 60)), [7, 8, 9]]


def prompt_logprobs(engine: Engine) -> np.ndarray:
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=1, ignore_eos=True)
    outputs = engine.generate(PROMPTS, params)
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 8
        entries = output.prompt_logprobs[1:]
        found += [entry[token].logprob for token, entry in zip(prompt[1:], entries, strict=True)]
    return np.array(found)


def test_fp8_runs_and_stays_close(checkpoint) -> None:
    found = {}
    for name in ("auto", "fp8", "fp8_e4m3"):
        with Engine(model=str(checkpoint()), kv_cache_dtype=name, **SMALL) as engine:
            found[name] = prompt_logprobs(engine)
            state = engine.core.runner.state
            assert state is not None
            assert {leaf.dtype for leaf in state.kv} == {np.dtype(jnp.float32 if name == "auto" else jnp.uint8)}
    np.testing.assert_array_equal(found["fp8"], found["fp8_e4m3"])
    assert 0 < np.abs(found["fp8"] - found["auto"]).max() < 0.2
    assert np.abs(found["fp8"] - found["auto"]).mean() < 0.04


def test_blocks_are_counted_in_bytes_of_the_cache(checkpoint) -> None:
    """A quarter of the float32 bytes a block, so four times the blocks of the same memory."""
    common = {**SMALL, "num_gpu_blocks_override": None, "max_num_seqs": 4}
    seen = []

    def solve(memory, bytes_per_block, block_size, resolved) -> int:
        seen.append(bytes_per_block)
        return 128

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup.kv_memory, "solve", solve)
        for name in ("auto", "fp8"):
            config = EngineConfig(model=str(checkpoint()), kv_cache_dtype=name, **common)
            startup.start(config, busy=lambda: False, progress=False)
    assert seen[0] == 4 * seen[1]


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3, got 'fp8_e5m2'"):
        EngineConfig(model="m", kv_cache_dtype="fp8_e5m2")
