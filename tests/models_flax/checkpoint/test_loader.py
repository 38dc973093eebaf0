"""Exact cover, tied heads, dtypes, placement, dummy weights and the memory that loading takes."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import ModelConfig
from octavo.models_flax.checkpoint import load_model, resolve
from octavo.models_flax.program import ModelDef, merge_model
from tests.references.dense_model import logits_of
from tests.references.tiny_models import (
    BY_NAME,
    TinyModel,
    make_weights,
    weight_shapes,
    write_checkpoint,
    write_safetensors,
)

type Weights = dict[str, np.ndarray]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def load(folder: pathlib.Path, **options: Any) -> tuple[ModelDef, tuple[jax.Array, ...]]:
    source = resolve(str(folder), load_format=options.get("load_format", "auto"))
    config = ModelConfig.from_hf(source.config, source.generation_config)
    return load_model(source, config, **({"dtype": jnp.float32, "progress": False} | options))


def write(model: TinyModel, folder: pathlib.Path, change: Callable[[Weights], object] | None = None) -> None:
    weights = dict(make_weights(model.name))
    if change:
        change(weights)
    write_checkpoint(model, folder, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(K_PROJ), f"the checkpoint lacks {K_PROJ}"),
        (lambda w: w.pop("lm_head.weight"), r"the checkpoint lacks lm_head\.weight"),
        (lambda w: w.update(extra=np.zeros(3, np.float32)), "no place for: extra"),
        (lambda w: w.update({f"{K_PROJ[:-6]}bias": np.zeros(32, np.float32)}), r"no place for: .*k_proj\.bias"),
        (lambda w: w.update({K_PROJ: w[K_PROJ].T.copy()}), r"k_proj\.weight has shape \(64, 32\), not \(32, 64\)"),
        (lambda w: w.update({K_PROJ: w[K_PROJ].reshape(-1)}), r"k_proj\.weight has shape \(2048,\), not \(32, 64\)"),
        (lambda w: w.clear(), "the checkpoint lacks model.embed_tokens.weight, .* and [0-9]+ more"),
    ],
    ids=["missing", "no-head", "unknown", "bias", "transposed", "flat", "empty"],
)
def test_cover_must_be_exact(change: Callable[[Weights], object], message: str, tmp_path: pathlib.Path) -> None:
    write(BY_NAME["llama-gqa"], tmp_path, change)
    with pytest.raises(LoadError, match=message):
        load(tmp_path)


def test_tensors_of_another_depth_are_refused(tmp_path: pathlib.Path) -> None:
    model = BY_NAME["llama-gqa"]
    write(model, tmp_path)
    for layers, message in ((3, r"no place for: model\.layers\.3\."), (5, r"lacks model\.layers\.4\.")):
        config = model.config | {"num_hidden_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError, match=message):
            load(tmp_path)


def test_stored_frequencies_are_ignored(tmp_path: pathlib.Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write(BY_NAME["llama-gqa"], tmp_path, lambda w: w.update({name: np.ones(8, np.float32)}))
    load(tmp_path)


@pytest.mark.parametrize("materialize", [False, True], ids=["embedding", "materialised"])
@pytest.mark.parametrize("duplicate", [False, True], ids=["no-head", "head"])
def test_tied_heads(materialize: bool, duplicate: bool, tmp_path: pathlib.Path) -> None:
    """A tied model's head is its embedding, whatever else the checkpoint brings."""
    model = BY_NAME["llama-tied"]
    extra = {"lm_head.weight": np.full((320, 64), 9.0, np.float32)} if duplicate else {}
    write(model, tmp_path, lambda w: w.update(extra))
    definition, leaves = load(tmp_path, materialize_tied_head=materialize)
    built = merge_model(definition, leaves)
    np.testing.assert_array_equal(built.embed.table.get_value(), make_weights(model.name)["model.embed_tokens.weight"])
    assert (built.head is not None) == materialize
    if built.head is not None:
        np.testing.assert_array_equal(built.head.weight.get_value(), built.embed.table.get_value().T)


def test_a_tied_model_without_a_head_gives_the_logits_of_an_untied_one_with_it(tmp_path: pathlib.Path) -> None:
    tied = BY_NAME["llama-tied"]
    write(tied, tmp_path / "tied")
    write(tied, tmp_path / "untied", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}))
    untied = tied.config | {"tie_word_embeddings": False}
    (tmp_path / "untied" / "config.json").write_text(json.dumps(untied))
    tokens = list(range(30, 50))
    expected = logits_of(str(tmp_path / "untied"))(tokens)
    for materialize in (False, True):
        found = logits_of(str(tmp_path / "tied"), materialize)(tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_fused_parameters_hold_what_the_checkpoint_says(tmp_path: pathlib.Path) -> None:
    model = BY_NAME["llama-biases"]
    write(model, tmp_path)
    layer = merge_model(*load(tmp_path)).layers[2]
    weights = {k.removeprefix("model.layers.2."): v for k, v in make_weights(model.name).items()}
    qkv = np.asarray(layer.attention.qkv.weight.get_value())  # [D, K, N / K + 2, H]
    bias = np.asarray(layer.attention.qkv.bias.get_value())
    query = 3  # of 4; it belongs to key/value head 3 // 2
    np.testing.assert_array_equal(qkv[:, 1, 1], weights["self_attn.q_proj.weight"][query * 16 : query * 16 + 16].T)
    np.testing.assert_array_equal(bias[1, 1], weights["self_attn.q_proj.bias"][query * 16 : query * 16 + 16])
    np.testing.assert_array_equal(qkv[:, 1, 2], weights["self_attn.k_proj.weight"][16:32].T)
    np.testing.assert_array_equal(qkv[:, 1, 3], weights["self_attn.v_proj.weight"][16:32].T)
    gate_up = np.asarray(layer.mlp.gate_up.weight.get_value())  # [D, 2, F]
    np.testing.assert_array_equal(gate_up[:, 0], weights["mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(gate_up[:, 1], weights["mlp.up_proj.weight"].T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "qwen3-tied"])  # stored as F32, F16 and BF16
def test_dtypes(name: str, dtype: Any, tmp_path: pathlib.Path) -> None:
    write(BY_NAME[name], tmp_path)
    definition, leaves = load(tmp_path, dtype=dtype)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(dtype)}
    norm = merge_model(definition, leaves).norm.scale.get_value()
    # Every weight of the tiny models is a bfloat16 number; F16 rounds the smallest.
    np.testing.assert_allclose(norm.astype(jnp.float32), make_weights(name)["model.norm.weight"], rtol=2**-10)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int8, "float8_e4m3fn"], ids=str)
def test_other_dtypes_are_refused(dtype: Any, tmp_path: pathlib.Path) -> None:
    write(BY_NAME["llama-gqa"], tmp_path)
    with pytest.raises(ConfigError, match="dtype must be bfloat16, float16 or float32"):
        load(tmp_path, dtype=dtype)


def test_parameters_do_not_share_memory_with_the_file(tmp_path: pathlib.Path) -> None:
    model = BY_NAME["llama-gqa"]
    write(model, tmp_path)
    _, leaves = load(tmp_path)
    before = [np.array(leaf) for leaf in leaves]
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:  # the same inode: a mapping would see it
        file.write(b"\xff" * path.stat().st_size)
    for old, leaf in zip(before, leaves, strict=True):
        np.testing.assert_array_equal(old, leaf)


def test_placement(tmp_path: pathlib.Path) -> None:
    write(BY_NAME["llama-gqa"], tmp_path)
    device = jax.devices()[3]
    _, on_one = load(tmp_path, device=device)
    assert all(leaf.devices() == {device} for leaf in on_one)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    sharded_axes = {"kv_heads", "heads", "mlp", "vocab"}

    def place(axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*("tensor" if axis in sharded_axes else None for axis in axes)))

    for options in ({}, {"load_format": "dummy"}):
        definition, plain = load(tmp_path, **options)
        _, sharded = load(tmp_path, place=place, **options)
        for a, b in zip(plain, sharded, strict=True):
            np.testing.assert_array_equal(a, b)
        qkv = merge_model(definition, sharded).layers[0].attention.qkv.weight.get_value()
        assert qkv.sharding.spec == PartitionSpec(None, "tensor")
        assert {shard.data.shape for shard in qkv.addressable_shards} == {(64, 1, 4, 16)}


def test_dummy_weights(tmp_path: pathlib.Path) -> None:
    write(BY_NAME["qwen3-tied"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    _, leaves = load(tmp_path, load_format="dummy", seed=3)
    assert all(0 < float(jnp.abs(leaf).max()) <= 1e-3 for leaf in leaves)
    assert len({float(leaf.reshape(-1)[0]) for leaf in leaves}) == len(leaves)
    for same, other in zip(load(tmp_path, load_format="dummy", seed=3)[1], leaves, strict=True):
        np.testing.assert_array_equal(same, other)
    assert not np.array_equal(load(tmp_path, load_format="dummy", seed=4)[1][0], leaves[0])
    built = merge_model(*load(tmp_path, load_format="dummy", seed=3, materialize_tied_head=True))
    np.testing.assert_array_equal(built.head.weight.get_value(), built.embed.table.get_value().T)
    np.testing.assert_array_equal(built.embed.table.get_value(), leaves[0])


def test_a_progress_bar_on_stderr(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(BY_NAME["llama-gqa"], tmp_path)
    load(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "Loading weights" in captured.err and "100%" in captured.err and not captured.out


MEASURE = """
import pathlib, sys, threading
import jax, jax.numpy as jnp
from octavo.configs.model import ModelConfig
from octavo.models_flax.checkpoint import load_model, resolve

def anonymous():
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) * 1024

jnp.zeros(3).block_until_ready()
source = resolve(sys.argv[1])
config = ModelConfig.from_hf(source.config)
peak, done, start = 0, threading.Event(), anonymous()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
_, leaves = load_model(source, config, dtype=jnp.bfloat16, progress=False)
done.set()
thread.join()
print(peak - start, sum(x.nbytes for x in leaves), max(x.nbytes for x in leaves))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_loading(tmp_path: pathlib.Path) -> None:
    """Beyond the parameters, at most twice the largest of them (and what compiling takes)."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 65536, "num_attention_heads": 16}
    config = BY_NAME["llama-tied"].config | sizes | {"num_key_value_heads": 8}
    big = TinyModel("big", config, stored="BF16")
    weights = {name: np.full(shape, 0.5, np.float32) for name, shape in weight_shapes(big).items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", weights, "BF16")
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, parameters, largest = map(int, result.stdout.split())
    assert parameters > 250e6
    extra = peak - parameters
    assert extra <= 2 * largest + 200e6, f"{extra / 1e6:.0f} MB beyond the parameters"
