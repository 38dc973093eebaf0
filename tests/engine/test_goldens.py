"""Every supported configuration through the engine, against transformers: whole, cached, chunked, batched."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from octavo.engine import Engine, SamplingParams, startup
from octavo.engine.buckets import Ladder, make_ladder
from tests.references import naive
from tests.references.compare import check_output
from tests.references.goldens import Golden, tiny_golden
from tests.references.tiny_gguf import write_gguf
from tests.references.tiny_models import BY_NAME, MODELS, TOP, TinyModel, write_checkpoint

BLOCK = 16
OTHERS = ([9, 8, 7] * 10, [200, 100] * 9)  # prompts that share the batch


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thirty engines start here: coarse programs can serve everything, and XLA's optimisations cost half the time."""

    def coarse_only(*arguments: Any) -> Ladder:
        ladder = make_ladder(*arguments)
        return Ladder(programs=ladder.coarse, coarse=ladder.coarse)

    monkeypatch.setattr(startup, "make_ladder", coarse_only)
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def start(model: pathlib.Path, golden: Golden, **options: Any) -> Engine:
    """A small engine whose step holds the golden's prompt and hardly more: two of them make chunks."""
    length = len(golden.prompt)
    budget = 56 if length < 56 else 160  # two rungs for all, so that programs are shared
    return Engine(
        str(model),
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        block_size=BLOCK,
        num_gpu_blocks_override=64,
        max_logprobs=TOP,
        progress=False,
        decode_rungs=(4,),
        token_rungs=(budget,),
        **options,
    )


def params(golden: Golden, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=len(golden.output), ignore_eos=True, logprobs=TOP, **options)


def check_all_ways(engine: Engine, golden: Golden, tolerance: float) -> None:
    """The same request alone, from the prefix cache, and in chunks beside others."""
    with_prompt, without = params(golden, prompt_logprobs=TOP), params(golden)
    alone = engine.generate(golden.prompt, with_prompt, use_tqdm=False)[0]
    assert alone.prompt_logprobs is not None
    check_output(alone, golden, tolerance)

    cached = engine.generate(golden.prompt, without, use_tqdm=False)[0]
    assert cached.num_cached_tokens == (len(golden.prompt) - 1) // BLOCK * BLOCK
    check_output(cached, golden, tolerance)

    other = SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    prompts = [OTHERS[0], golden.prompt, OTHERS[1], golden.prompt]
    results = engine.generate(prompts, [other, with_prompt, other, without], use_tqdm=False)
    check_output(results[1], golden, tolerance)
    check_output(results[3], golden, tolerance)


@pytest.mark.golden
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_float32(tiny: TinyModel, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tiny, tmp_path)
    golden = tiny_golden(tiny)
    with start(tmp_path, golden, dtype="float32") as engine:
        check_all_ways(engine, golden, tolerance=2e-3)


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_bfloat16(tiny: TinyModel, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tiny, tmp_path)
    golden = tiny_golden(tiny)
    with start(tmp_path, golden, dtype="bfloat16", gpu_memory_utilization=0.3) as engine:
        check_all_ways(engine, golden, tolerance=5e-2)


@pytest.mark.golden
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-tied"])
def test_gguf_without_loss(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"{name}.gguf"
    write_gguf(BY_NAME[name], path, kind)
    golden = tiny_golden(BY_NAME[name])
    with start(path, golden, dtype="float32") as engine:
        result = engine.generate(golden.prompt, params(golden, prompt_logprobs=TOP), use_tqdm=False)[0]
    check_output(result, golden, 2e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_dequantised(kind: str, tmp_path: pathlib.Path) -> None:
    """Quantised weights give what a naive model makes of them after dequantisation."""
    tiny = BY_NAME["llama-gqa"]
    kept = write_gguf(tiny, tmp_path / "model.gguf", kind)
    golden = tiny_golden(tiny)
    ids = golden.prompt + golden.output
    expected = naive.prompt_logprobs(naive.NaiveModel(tiny.config, kept), ids)
    with start(tmp_path / "model.gguf", golden, dtype="float32") as engine:
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        result = engine.generate(golden.prompt, one, use_tqdm=False)[0]
    assert result.prompt_logprobs is not None
    for index, entries in enumerate(result.prompt_logprobs[1:]):
        token = golden.prompt[index + 1]
        assert entries[token].logprob == pytest.approx(expected[index, token], abs=1e-3)
