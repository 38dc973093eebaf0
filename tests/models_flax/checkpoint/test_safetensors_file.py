"""Hostile safetensors headers and indices."""

import json
import pathlib
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from octavo.configs.errors import LoadError
from octavo.models_flax.checkpoint.safetensors_file import INDEX, SafetensorsFile, SafetensorsReader
from tests.references.tiny_models import write_safetensors

F32 = np.dtype(np.float32)


def write(path: pathlib.Path, header: Any, data: bytes = b"", length: int | None = None) -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def vector(x: float) -> np.ndarray:
    return np.array([x], np.float32)


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_was_written(tmp_path: pathlib.Path) -> None:
    weights: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([[7.5]], np.float32),
        "empty": np.zeros((0, 4)),
    }
    for stored in ("F32", "F16", "BF16"):
        write_safetensors(tmp_path / "x.safetensors", weights, stored)
        file = SafetensorsFile(tmp_path / "x.safetensors")
        for name, value in weights.items():
            found = file.read(name, F32)
            np.testing.assert_array_equal(found.astype(np.float32), value)
            assert not found.flags.writeable


HOSTILE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "length-2**63": ({}, b"", 2**63, "header length 9223372036854775808 exceeds"),
    "length-beyond-file": ({}, b"", 1000, "header length 1000 exceeds"),
    "not-json": (b"{]", b"", None, "header is not JSON"),
    "not-utf8": (b"\xff\xfe{}", b"", None, "header is not JSON"),
    "too-deep": (b'{"a":' + b"[" * 100_000, b"", None, "header is not JSON"),
    "a-list": ([], b"", None, "not a JSON object"),
    "entry-not-object": ({"a": 3}, b"", None, "tensor a: header entry is not an object"),
    "overlap": ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12), None, "tensors a and b overlap"),
    "beyond-end": ({"a": entry([4], [0, 16])}, bytes(8), None, r"data_offsets \[0, 16\] outside of the 8 bytes"),
    "negative": ({"a": entry([1], [-4, 0])}, bytes(8), None, "data_offsets"),
    "reversed": ({"a": entry([1], [8, 4])}, bytes(8), None, "data_offsets"),
    "three-offsets": ({"a": entry([1], [0, 4, 8])}, bytes(8), None, "data_offsets"),
    "shape-mismatch": ({"a": entry([3], [0, 8])}, bytes(8), None, r"8 bytes do not hold F32 of shape \[3\]"),
    "huge-shape": ({"a": entry([2**62, 2**62], [0, 8])}, bytes(8), None, "8 bytes do not hold"),
    "negative-shape": ({"a": entry([-1], [0, 8])}, bytes(8), None, "bad shape"),
    "float-shape": ({"a": entry([2.0], [0, 8])}, bytes(8), None, "bad shape"),
    "unknown-dtype": ({"a": entry([2], [0, 8], "X9")}, bytes(8), None, "unknown dtype 'X9'"),
    "dtype-a-list": ({"a": entry([2], [0, 8], ["F32"])}, bytes(8), None, "unknown dtype"),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8), None, "'a' appears twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: pathlib.Path) -> None:
    header, data, length, message = HOSTILE[name]
    path = write(tmp_path / "model.safetensors", header, data, length)
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(LoadError, match=message) as error:
        SafetensorsFile(path)
    assert time.monotonic() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567"], ids=["empty", "seven-bytes"])
def test_files_too_short(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        SafetensorsReader(tmp_path)


def test_integer_tensors_are_refused_when_read(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry([8], [0, 8], "I8")}, bytes(8))
    with pytest.raises(LoadError, match="tensor a has dtype I8"):
        SafetensorsFile(path).read("a", F32)


def index(folder: pathlib.Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def value(folder: pathlib.Path, name: str) -> float:
    return float(SafetensorsReader(folder).read(name, F32)[0])


def test_only_the_index_assigns_tensors(tmp_path: pathlib.Path) -> None:
    """Neither a stray file of the usual name, nor a second copy in another shard, is used."""
    write_safetensors(tmp_path / "one.safetensors", {"a": vector(1), "b": vector(99), "extra": np.zeros(2)})
    write_safetensors(tmp_path / "two.safetensors", {"b": vector(2)})
    write_safetensors(tmp_path / "model.safetensors", {"a": vector(77)})
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": vector(78), "c": vector(3)})
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert set(SafetensorsReader(tmp_path).tensors) == {"a", "b"}
    assert (value(tmp_path, "a"), value(tmp_path, "b")) == (1.0, 2.0)


def test_without_an_index_the_usual_file_is_used(tmp_path: pathlib.Path) -> None:
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": vector(78)})
    assert value(tmp_path, "a") == 78.0
    write_safetensors(tmp_path / "model.safetensors", {"a": vector(77)})
    assert value(tmp_path, "a") == 77.0
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(LoadError, match=r"exactly one .* found: consolidated\.safetensors, other\.safetensors"):
        SafetensorsReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: pathlib.Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": vector(1)})
    index(tmp_path, {"a": "one.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(LoadError, match=r"names model-00002-of-00002\.safetensors, which is not in"):
        SafetensorsReader(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: pathlib.Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": vector(1)})
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(LoadError, match=r"b is in one\.safetensors, but it is not there"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "x.bin", "", 3, None]
)
def test_shard_names_stay_in_the_folder(shard: Any, tmp_path: pathlib.Path) -> None:
    index(tmp_path, {"a": shard})
    with pytest.raises(LoadError, match=r"assigns a to .*, which is not a plain \.safetensors file name"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', "{", '{"weight_map": {"a": "x", "a": "y"}}'])
def test_malformed_indices(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(LoadError, match="index"):
        SafetensorsReader(tmp_path)
