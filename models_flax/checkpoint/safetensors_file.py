"""Reads safetensors: one file, or shards named by an index.

Every number of a header is checked against the file before anything is read.
Of a sharded checkpoint only the index's assignments count: what else lies in a shard
or in the folder is ignored, and a shard that is not there is an error.
"""

import json
import math
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from octavo.configs.errors import LoadError
from octavo.models_flax.checkpoint.tensors import DTYPES, TensorInfo, map_file, unique_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes, the format's own limit

_ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


class SafetensorsFile:
    """One file, its header checked."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._memory = map_file(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        try:
            self._parse()
        except LoadError as error:
            raise LoadError(f"{path.name}: {error}") from error

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A view of the file."""
        del dtype
        info = self.tensors[name]
        if info.kind not in DTYPES:
            raise LoadError(f"tensor {name} has dtype {info.kind}, which needs quantisation support; have {[*DTYPES]}")
        start, _ = self._offsets[name]
        return np.frombuffer(self._memory, DTYPES[info.kind], count=math.prod(info.shape), offset=start).reshape(
            info.shape
        )

    def _parse(self) -> None:
        size = len(self._memory)
        if size < 8:
            raise LoadError(f"too short for a safetensors file ({size} bytes)")
        (length,) = struct.unpack_from("<Q", self._memory, 0)
        if length > min(size - 8, MAX_HEADER):
            raise LoadError(f"header length {length} exceeds the file ({size} bytes) or the limit of {MAX_HEADER}")
        try:
            header = json.loads(self._memory[8 : 8 + length], object_pairs_hook=unique_object)
        except (ValueError, RecursionError) as error:
            if isinstance(error, LoadError):
                raise
            raise LoadError(f"header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise LoadError("header is not a JSON object")
        header.pop("__metadata__", None)
        data_start = 8 + length
        for name, entry in header.items():
            self.tensors[name], (start, end) = _entry(name, entry, size - data_start)
            self._offsets[name] = (data_start + start, data_start + end)
        last_name, last_end = "", data_start
        for name, (start, end) in sorted(self._offsets.items(), key=lambda item: item[1]):
            if start < last_end:
                raise LoadError(f"tensors {last_name} and {name} overlap")
            last_name, last_end = name, end


class SafetensorsReader:
    """The tensors of one model, in one file or in shards."""

    def __init__(self, folder: pathlib.Path) -> None:
        index = folder / INDEX
        shard_of = _weight_map(index) if index.exists() else None
        if shard_of is None:
            file = SafetensorsFile(_only_file(folder))
            self._files = dict.fromkeys(file.tensors, file)
        else:
            shards = {}
            for name in sorted(set(shard_of.values())):
                if not (folder / name).is_file():
                    raise LoadError(f"{INDEX} names {name}, which is not in {folder}")
                shards[name] = SafetensorsFile(folder / name)
            for tensor, shard in shard_of.items():
                if tensor not in shards[shard].tensors:
                    raise LoadError(f"{INDEX} says that {tensor} is in {shard}, but it is not there")
            self._files = {tensor: shards[shard] for tensor, shard in shard_of.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A view of the file that holds the tensor."""
        return self._files[name].read(name, dtype)


def has_safetensors(folder: pathlib.Path) -> bool:
    """Whether a folder holds weights of this format."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def _only_file(folder: pathlib.Path) -> pathlib.Path:
    if (folder / SINGLE).exists():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(f.name for f in files) or "none"
        raise LoadError(f"{folder} needs {SINGLE}, {INDEX} or exactly one .safetensors file; found: {names}")
    return files[0]


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=unique_object)
    except LoadError as error:
        raise LoadError(f"{INDEX}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {index}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{INDEX} has no weight_map")
    for tensor, shard in weight_map.items():
        # The name comes from the checkpoint: it must not lead out of the folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w\-. ]+\.safetensors", shard):
            raise LoadError(f"{INDEX} assigns {tensor} to {shard!r}, which is not a plain .safetensors file name")
    return weight_map


def _entry(name: str, entry: Any, data_size: int) -> tuple[TensorInfo, tuple[int, int]]:
    if not isinstance(entry, dict):
        raise LoadError(f"tensor {name}: header entry is not an object")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _ITEM_SIZES:
        raise LoadError(f"tensor {name}: unknown dtype {kind!r}")
    if not _sizes(shape) or len(shape) > 16:
        raise LoadError(f"tensor {name}: bad shape {shape!r}")
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        raise LoadError(f"tensor {name}: data_offsets {offsets!r} outside of the {data_size} bytes of data")
    start, end = offsets
    if end - start != math.prod(shape) * _ITEM_SIZES[kind]:
        raise LoadError(f"tensor {name}: {end - start} bytes do not hold {kind} of shape {shape}")
    return TensorInfo(tuple(shape), kind), (start, end)


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value)
