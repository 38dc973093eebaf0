"""Tuned parameters: found, written, read, and refused where the file is wrong."""

import json
import math
import time
import unittest.mock

import jax
import pytest

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import tune, tuning
from octavo.pallas_kernels.ragged_paged_attention import dispatch
from octavo.pallas_kernels.ragged_paged_attention.cases import BENCH_CASES, RAGGED_CASES
from octavo.pallas_kernels.ragged_paged_attention.parameters import DEFAULT, Parameters

HEAD = {"device": "NVIDIA H200", "date": "2026-12-01", "versions": {"jax": "0.11.2"}}
WANTED = {"head_size": 128, "kv_dtype": "bfloat16"}


def entry(**changes) -> dict:
    return {"for": {**WANTED, **changes}, "parameters": {"decode_tile": 128}, "gain": 0.1}


def test_written_and_found(tmp_path):
    path = tuning.path_for("NVIDIA H200", tmp_path)
    assert path.name == "nvidia_h200.json"
    tuning.write(path, HEAD, "op", [entry()])
    tuning.write(path, HEAD, "other", [entry()])
    tuning.write(path, HEAD, "op", [entry(head_size=64)])
    find = lambda kind, op, **changes: tuning.lookup(  # noqa: E731
        kind, op, {**WANTED, **changes}, DEFAULT, Parameters, tmp_path
    )
    assert find("NVIDIA H200", "op") == find("NVIDIA H200", "op", head_size=64) == Parameters(decode_tile=128)
    assert find("NVIDIA H200", "op", head_size=96) == DEFAULT
    assert find("NVIDIA H100", "op") == find("NVIDIA H200", "third") == DEFAULT
    tuning.write(path, HEAD, "op", [{**entry(), "parameters": {"decode_tile": 64}}])
    assert find("NVIDIA H200", "op") == Parameters(decode_tile=64)
    assert len(json.loads(path.read_text())["ops"]["op"]) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"ops": {"op": [{"for": 1, "parameters": {}}]}}', '{"ops": 3}'])
def test_a_broken_file_is_named(tmp_path, text):
    tuning.path_for("x", tmp_path).write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is no file of tuned parameters"):
        tuning.read("x", tmp_path)


def test_unknown_parameters_are_named(tmp_path):
    tuning.write(tuning.path_for("x", tmp_path), HEAD, "op", [{**entry(), "parameters": {"warps": 3}}])
    with pytest.raises(ConfigError, match=r"x\.json: op has other parameters: .*warps"):
        tuning.lookup("x", "op", WANTED, DEFAULT, Parameters, tmp_path)


def test_what_ships_can_be_read():
    for path in tuning.FOLDER.glob("*.json"):
        found = json.loads(path.read_text())
        assert tuning.path_for(found["device"]) == path
        for one in found["ops"].get(dispatch.OP, []):
            made = tuning.lookup(found["device"], dispatch.OP, one["for"], DEFAULT, Parameters)
            assert made == Parameters(**one["parameters"])


def test_tuned_parameters_reach_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.write(tuning.path_for("a Hopper", tmp_path), HEAD, dispatch.OP, [entry()])
    device = unittest.mock.Mock(
        spec=jax.Device, platform="gpu", compute_capability="9.0", core_count=132, device_kind="a Hopper"
    )
    heads = dispatch.Heads(32, 8, 128, 16, "bfloat16", "bfloat16")
    chosen = dispatch.choose("auto", "gpu", heads, device)
    assert chosen.tiling.parameters == Parameters(decode_tile=128)
    assert chosen.tiling.workers.step == 128
    given = dispatch.hopper(heads, device, Parameters(blocks_per_core=2, shortest=64))
    assert given.tiling.workers.lists == 2 * 2 * 132 and given.tiling.workers.shortest == 64


GROUPS = (
    tune.Group(({"decode_tile": 128}, {"decode_stages": 3}), ("a", "b"), "check"),
    tune.Group(({"shortest": 64}, {"shortest": 256}), ("b",), "check"),
)


def test_search_keeps_what_gains_and_names_what_fails():
    def measure(case, parameters):
        if parameters.decode_stages == 3:
            raise ValueError("exceeds available shared memory\nmore")
        return (0.8 if parameters.decode_tile == 128 else 1.0) * (0.995 if parameters.shortest == 64 else 1.0)

    told = []
    best, gain = tune.search(GROUPS, measure, lambda *_: None, lambda *x: told.append(x))
    assert best == Parameters(decode_tile=128)  # half a percent is noise
    assert gain == pytest.approx(-math.log(0.8) * 2 / 3)
    assert told == [({"decode_stages": 3}, "exceeds available shared memory")]

    wrong = lambda name, parameters: "relative error 1" if parameters.decode_tile == 128 else None  # noqa: E731
    told.clear()
    assert tune.search(GROUPS, measure, wrong, lambda *x: told.append(x)) == (DEFAULT, 0.0)
    assert ({"decode_tile": 128}, "relative error 1") in told


def test_search_stops_in_time():
    tuner = tune.Tuner(128, "bfloat16", None, deadline=time.monotonic() - 1)
    assert tune.search(tune.GROUPS, tuner.measure, tuner.check, lambda *_: None) == (DEFAULT, 0.0)


def test_groups_name_real_cases_and_parameters():
    timed, checked = ({case.name for case in cases} for cases in (BENCH_CASES, RAGGED_CASES))
    for group in tune.GROUPS:
        assert set(group.cases) <= timed and group.check in checked
        for change in group.candidates:
            Parameters(**change)


def test_without_a_hopper_nothing_is_tuned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tune", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="compute capability"):
        tune.main()
    assert not list(tmp_path.iterdir())
