"""EngineConfig refuses values of the wrong type and out of range, by the name of the option."""

import dataclasses
from typing import Any

import pytest

from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineConfig)])
def test_every_option_is_checked_by_its_type(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got <object"):
        EngineConfig(**{"model": "m", name: object()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization must be a number, got 'x'"),
        ({"max_logprobs": None}, "max_logprobs must be an integer, got None"),
        ({"max_logprobs": True}, "max_logprobs must be an integer, got True"),
        ({"num_gpu_blocks_override": "8"}, "num_gpu_blocks_override must be an integer or None, got '8'"),
        ({"hf_overrides": None}, "hf_overrides must be a dict whose keys are strings, got None"),
        ({"hf_overrides": {1: 2}}, "hf_overrides must be a dict whose keys are strings"),
        ({"decode_rungs": 4}, "decode_rungs must be a tuple of integers or None, got 4"),
        ({"decode_rungs": [4]}, r"decode_rungs must be a tuple of integers or None, got \[4\]"),
        ({"token_rungs": (48.0,)}, r"token_rungs must be a tuple of integers or None, got \(48.0,\)"),
        ({"token_rungs": (True,)}, "token_rungs must be a tuple of integers or None"),
        ({"block_size": 16.0}, "block_size must be an integer, got 16.0"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false, got 'no'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, got 1"),
        ({"gpu_memory_utilization": float("nan")}, "must be in"),
        ({"gpu_memory_utilization": 10**400}, "must be in"),
        ({"max_model_len": 0}, "max_model_len must be a positive number, got 0"),
        ({"block_size": 15}, "block_size must be one of 8, 16"),
        ({"decode_rungs": (4, 2)}, "decode_rungs must be increasing"),
    ],
    ids=ascii,
)
def test_refusals_name_the_option(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"model": "m", **change})


def test_an_integer_is_a_number() -> None:
    assert EngineConfig(model="m", gpu_memory_utilization=1).gpu_memory_utilization == 1


@pytest.mark.parametrize("budget", [300, 2047, 2048, 5001])
def test_mixed_programs_of_accelerators_have_multiples_of_eight(budget: int) -> None:
    """And hold the budget."""
    rungs = EngineConfig(model="m", max_num_batched_tokens=budget).resolve("gpu", 4096).token_rungs
    assert all(rung % 8 == 0 for rung in rungs)
    assert rungs[-1] >= budget
    with pytest.raises(ConfigError, match="multiples of 8"):
        EngineConfig(model="m", max_num_batched_tokens=1001, token_rungs=(1001,)).resolve("gpu", 4096)


@pytest.mark.parametrize("most", [1, 8, 17, 100, 256])
def test_decode_rungs_waste_at_most_a_quarter_above_16_rows(most: int) -> None:
    rungs = EngineConfig(model="m", max_num_seqs=most).resolve("gpu", 4096).decode_rungs
    assert rungs[-1] == most
    for rows in range(17, most + 1):
        assert min(r for r in rungs if r >= rows) <= rows * 1.25
