"""Whole engine steps compiled for devices that are not here: one graph, everything in place."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.engine.compile_steps import thunks

HAS_CUDA_PLUGIN = any(
    importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
)


def reports(repository, environment, *arguments) -> list[dict]:
    command = [sys.executable, "-m", "tests.engine.compile_steps", *arguments]
    path = os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        command, env=os.environ | environment | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_CUDA_PLUGIN, reason="needs jax's CUDA plugin to compile for a GPU (no GPU): the extra cuda13"
)
def test_a_step_of_llama_8b_is_one_cuda_graph(repository, tmp_path):
    """The decode step of 256 rows and a mixed step of 2048 tokens, of all 32 layers, for an H200.

    One command buffer and nothing outside it; caches and weights are neither copied nor doubled.
    """
    environment = {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": f"--xla_gpu_autotune_level=0 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text",
    }
    found = reports(repository, environment, "h200", str(tmp_path))
    assert [tuple(report["program"]) for report in found] == [(256, 256, "plain"), (2048, 256, "plain")]
    for report in found:
        outside = {kind for kind in report["thunks"] if kind.startswith("outside")}
        assert outside == {"outside kCommandBuffer"}, report
        assert report["thunks"]["outside kCommandBuffer"] == 1, report
        assert report["alias"] >= report["layers"] * report["layer_bytes"], report
        assert report["temp"] < report["layer_bytes"] / 2, report
        assert report["largest_copy"] == 0, report


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu (no TPU): the extra tpu")
def test_a_step_compiles_for_a_tpu(repository):
    """SmolLM2's decode step of 64 rows and a mixed step of 512 tokens, for a v5e: caches in place."""
    import libtpu

    environment = {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": libtpu.get_library_path()}
    found = reports(repository, environment, "v5e")
    assert len(found) == 2
    for report in found:
        assert report["alias"] >= report["layers"] * report["layer_bytes"], report
        assert report["temp"] < report["layer_bytes"] / 4, report
        assert 2 * report["largest_copy"] < report["layer_bytes"] / 4, report


def test_thunks_are_counted_inside_and_outside():
    text = "000: kCommandBuffer [source]\n    001: kCopy [sink]\n002: kWhile [sink]\ncondition:\n    003: kCopy x\n"
    assert thunks(text) == {"outside kCommandBuffer": 1, "outside kWhile": 1, "inside kCopy": 2}
