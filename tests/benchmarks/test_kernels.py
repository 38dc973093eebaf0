"""The kernels' benchmark at sizes that a CPU can run: its rows, its merging, and that its checks find what is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels, sample_kernels
from benchmarks.report import merge_rows
from octavo.pallas_kernels import timing
from octavo.pallas_kernels.ragged_paged_attention import timing as attention_timing
from octavo.pallas_kernels.ragged_paged_attention.cases import BENCH_CASES, RAGGED_CASES

CEILINGS = timing.Ceilings(copy=1e12, read=2e12, product=1e14)
METRICS = {"us", "tbps", "tfps", "ratio", "rel_err"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(attention_timing, "POOL_BYTES", 100_000)
    monkeypatch.setattr(attention_timing, "calls_of", lambda case: 2)
    monkeypatch.setattr(timing.seconds_per_call, "__kwdefaults__", {"queued": 1, "repeats": 1})


def small(name, *rows, num_tokens, **changes):
    case = next(c for c in BENCH_CASES if c.name == name)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "num_rows": 4}
    return dataclasses.replace(case, rows=rows, num_tokens=num_tokens, **sizes, **changes)


def test_attention_rows():
    cases = [
        small("decode_1x1024", (1, 100), (1, 30), (1, 7), num_tokens=4),
        small("prefill_8x1024", (16, 40), (7, 7), num_tokens=32),
        small("decode_fp8_256x1024", (1, 9), (1, 30), num_tokens=4),
    ]
    found = {}
    kernels.run_attention(cases, "reference", CEILINGS, "none", found.__setitem__)
    assert list(found) == [case.name for case in cases]
    for values in found.values():
        assert set(values) <= METRICS
        assert 0 < values["rel_err"] < 5e-3
    assert "tfps" in found["prefill_8x1024"] and "tbps" in found["decode_1x1024"]
    decode = found["decode_1x1024"]
    assert decode["tbps"] == pytest.approx(137 * 2 * 16 * 2 * 2 / decode["us"] / 1e6)
    assert decode["ratio"] == pytest.approx(decode["tbps"] / 2)


def test_the_error_is_seen():
    case = small("decode_1x1024", (1, 100), (1, 30), num_tokens=4)
    bench = attention_timing.make_bench(case, kernels.implementation(case, "reference"))
    q, cache = bench.inputs()
    right = bench.attend
    wrong = dataclasses.replace(bench, attend=lambda *a: right(*a) + jnp.bfloat16(0.01))
    assert attention_timing.relative_error(bench, q, cache) < 5e-3 < attention_timing.relative_error(wrong, q, cache)


def test_each_copy_has_blocks_of_its_own():
    case = small("decode_1x1024", (1, 100), (1, 30), num_tokens=4)
    bench = attention_timing.make_bench(case, kernels.implementation(case, "reference"), calls=64)
    used = np.concatenate([table[table > 0] for table in bench.tables])
    assert len(bench.tables) == 6 and len(set(used)) == len(used) == bench.cache_shape[0] - 1
    assert np.prod(bench.cache_shape) * 2 >= 100_000


@pytest.mark.parametrize("case", sample_kernels.CASES)
def test_sampling_rows(case):
    found = {}
    sample_kernels.run_sampling([case], CEILINGS, found.__setitem__, rows=8, vocabulary=2000)
    assert found[case]["rel_err"] == 0
    assert set(found[case]) == {"us", "tbps", "ratio", "rel_err"}


def test_what_a_sort_keeps():
    logits = np.log(np.array([[0.5, 0.3, 0.12, 0.05, 0.03] + [1e-9] * 60], np.float32)) * sample_kernels.TEMPERATURE
    kept = [sample_kernels._kept(logits, np.array([i]), "sample_full")[0] for i in range(5)]
    assert kept == [True, True, True, False, False]
    assert not sample_kernels._kept(logits, np.array([1]), "sample_greedy")[0]


def test_a_partial_run_replaces_its_rows(tmp_path):
    path = tmp_path / "h200" / "kernels.json"
    old = [{"case": name, "metric": "us", "value": 1.0} for name in ("a", "b")]
    merge_rows(path, {"commit": "one", "date": "2026-12-01", "device": "x"}, old)
    merge_rows(
        path, {"commit": "two", "date": "2026-12-01", "device": "x"}, [{"case": "b", "metric": "us", "value": 2.0}]
    )
    merge_rows(
        path, {"commit": "two", "date": "2026-12-02", "device": "x"}, [{"case": "c", "metric": "us", "value": 3.0}]
    )
    found = json.loads(path.read_text())
    assert found["commit"] == "two" and found["date"] == "2026-12-02"
    assert found["rows"] == [
        {"case": "a", "metric": "us", "value": 1.0, "commit": "one", "date": "2026-12-01"},
        {"case": "b", "metric": "us", "value": 2.0, "date": "2026-12-01"},
        {"case": "c", "metric": "us", "value": 3.0},
    ]


def test_the_issue_s_cases_are_there():
    """Ids of results/*/kernels.json; whoever compares runs relies on them."""
    names = [case.name for case in BENCH_CASES] + list(sample_kernels.CASES)
    assert names == [
        "decode_256x1024", "decode_128x4096", "decode_256x256", "decode_32x1024", "decode_16x8192", "decode_1x8192",
        "decode_1x1024", "decode_skewed", "prefill_1x8192", "prefill_1x32768", "prefill_8x1024", "chunk_512_on_16k",
        "mixed_2048_255", "decode_fp8_256x1024", "sample_greedy", "sample_full",
    ]  # fmt: skip
    for case in RAGGED_CASES:
        assert sum(q_len for q_len, _ in case.rows) < case.num_tokens and len(case.rows) < case.num_rows


def test_header(monkeypatch):
    top = kernels.header("abc", CEILINGS)
    assert {"commit", "date", "device", "versions", "ceilings"} == set(top)
    assert top["versions"]["jax"] == jax.__version__
    monkeypatch.chdir("/")
    assert kernels.git_commit() == "uncommitted"
