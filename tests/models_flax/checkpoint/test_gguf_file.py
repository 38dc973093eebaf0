"""GGUF headers that nobody vouches for: every damage is a LoadError, at once and without memory."""

import contextlib
import pathlib
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import ModelConfig
from octavo.engine.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.models_flax.checkpoint import gguf_file, resolve
from octavo.models_flax.checkpoint.gguf_file import GGUFFile
from tests.references.gguf_files import header, string, tensor, value, write_gguf
from tests.references.tiny_gguf import write_gguf as write_tiny_gguf
from tests.references.tiny_models import BY_NAME

U32, BOOL, STRING, ARRAY, F32, Q4_0, Q8_0, Q4_K, IQ4_XS = 4, 7, 8, 9, 0, 2, 8, 12, 23


def key(name: str | bytes, kind: int, raw: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + raw


def array(item: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + raw


def tensors(*entries: bytes) -> bytes:
    return header(len(entries), 0) + b"".join(entries) + bytes(999)


ALIGNMENT = string("general.alignment")
LONG = bytes(64)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot read"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "short": (b"GGUF\3\0", "ends inside its header"),
    "version-1": (header(0, 0, version=1), "version 1 is not supported"),
    "version-2**32-1": (header(0, 0, version=2**32 - 1), "version 4294967295 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
    "n_kv-2**63": (header(0, 2**63) + LONG, "claims 9223372036854775808 metadata keys"),
    "n_tensors-2**64-1": (header(2**64 - 1, 0) + LONG, "claims 18446744073709551615 tensors"),
    "n_kv-too-many": (header(0, 20_000) + bytes(20_000 * 14), "20000 metadata keys and 0 tensors, at most 16384"),
    "n_dims-2**32-1": (header(1, 0) + string("t") + struct.pack("<I", 2**32 - 1) + LONG, "4294967295 dimensions"),
    "n_dims-5": (tensors(tensor("t", [1] * 5, F32, 0)), "tensor t has 5 dimensions, at most 4"),
    "key-length-2**60": (header(0, 1) + struct.pack("<Q", 2**60) + LONG, "claims 1152921504606846976 bytes"),
    "key-length-2**64-1": (header(0, 1) + struct.pack("<Q", 2**64 - 1) + LONG, "claims 18446744073709551615 bytes"),
    "key-length-cut": (header(0, 1) + bytes(14 - 8) + bytes(8)[:1], "claims 1 metadata keys, but only 7"),
    "empty-key": (header(0, 1) + key("", U32, bytes(4)), "has 0 characters"),
    "long-key": (header(0, 1) + key("k" * 70_000, U32, bytes(4)), "has 70000 characters, it must have 1 to 65535"),
    "key-not-utf8": (header(0, 1) + key(b"\xff\xff", U32, bytes(4)), "name of a metadata key is not UTF-8"),
    "tensor-not-utf8": (tensors(string(b"\xc3") + tensor("", [1], F32, 0)[8:]), "name of a tensor is not UTF-8"),
    "value-not-utf8": (header(0, 1) + key("k", STRING, string(b"a\xffb")), "k is not UTF-8"),
    "entry-not-utf8": (header(0, 1) + key("k", ARRAY, array(STRING, 1, string(b"\xed\xa0\x80"))), "k is not UTF-8"),
    "string-length-2**60": (header(0, 1) + key("k", STRING, struct.pack("<Q", 2**60)), "bytes of k"),
    "array-length-2**62": (header(0, 1) + key("k", ARRAY, array(U32, 2**62)), "claims 4611686018427387904 entries"),
    "array-length-2**64-1": (header(0, 1) + key("k", ARRAY, array(BOOL, 2**64 - 1)), "18446744073709551615 entries"),
    "array-of-strings": (header(0, 1) + key("k", ARRAY, array(STRING, 2**61)), "entries of k"),
    "array-too-deep": (header(0, 1) + key("k", ARRAY, array(ARRAY, 1) * 9 + bytes(32)), "nested more than 4 deep"),
    "array-of-unknown": (header(0, 1) + key("k", ARRAY, array(13, 1) + bytes(32)), "unknown value type 13"),
    "unknown-value-type": (header(0, 1) + key("k", 99, bytes(16)), "unknown value type 99"),
    "same-key-twice": (header(0, 2) + key("k", U32, bytes(4)) * 2, "'k' appears twice"),
    "same-tensor-twice": (tensors(*[tensor("t", [1], F32, 0)] * 2), "'t' appears twice"),
    "alignment-0": (header(0, 1) + ALIGNMENT + value(0), "power of two up to 1048576, got 0"),
    "alignment-3": (header(0, 1) + ALIGNMENT + value(3), "power of two"),
    "alignment-2**31": (header(0, 1) + ALIGNMENT + value(2**31), "power of two"),
    "alignment-true": (header(0, 1) + ALIGNMENT + value(True), "power of two up to 1048576, got True"),
    "alignment-text": (header(0, 1) + ALIGNMENT + value("32"), "power of two"),
    "dims-overflow": (tensors(tensor("t", [2**32, 2**32], F32, 0)), "tensor t of shape"),
    "dims-overflow-to-0": (tensors(tensor("t", [2**63, 2, 1, 4], F32, 0)), "tensor t of shape"),
    "dims-overflow-blocks": (tensors(tensor("t", [2**64 - 256, 2**64 - 1], Q4_K, 0)), "tensor t of shape"),
    "offset-past-end": (tensors(tensor("t", [1], F32, 2**40)), "needs bytes 1099511627776"),
    "offset-2**64": (tensors(tensor("t", [1], F32, 2**64 - 32)), "needs bytes"),
    "offset-unaligned": (tensors(tensor("t", [1], F32, 4)), "not a multiple of the alignment"),
    "overlap": (tensors(tensor("t", [16], F32, 0), tensor("u", [16], F32, 32)), "tensors t and u overlap"),
    "same-place": (tensors(tensor("t", [16], F32, 0), tensor("u", [16], F32, 0)), "tensors t and u overlap"),
    "odd-blocks": (tensors(tensor("t", [33], Q8_0, 0)), "rows of 33 do not divide into Q8_0 blocks"),
    "odd-blocks-rows": (tensors(tensor("t", [16, 2], Q4_0, 0)), "rows of 16 do not divide into Q4_0 blocks of 32"),
    "odd-blocks-K": (tensors(tensor("t", [128, 2], Q4_K, 0)), "rows of 128 do not divide into Q4_K blocks of 256"),
    "scalar-block": (tensors(tensor("t", [], Q4_K, 0)), "rows of 1 do not divide into Q4_K blocks"),
    "type-IQ4_XS": (tensors(tensor("t", [256], IQ4_XS, 0)), "tensor t has type IQ4_XS, not supported; supported: F32"),
    "type-unknown": (tensors(tensor("t", [32], 4000, 0)), "unknown type 4000"),
    "type-removed": (tensors(tensor("t", [32], 4, 0)), "unknown type 4"),
}  # fmt: skip


@contextlib.contextmanager
def bounded(seconds: float = 1.0, num_bytes: int = 1 << 20) -> Iterator[None]:
    """Fails if the block takes longer or allocates more at once."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        yield
        taken, peak = time.monotonic() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < seconds
    assert peak < num_bytes


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: pathlib.Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with bounded(), pytest.raises(LoadError, match=message) as error:
        GGUFFile(path)
    assert "model.gguf" in str(error.value)


def test_arrays_have_an_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python objects take ten times the bytes in the file, so their number is bounded over all arrays."""
    monkeypatch.setattr(gguf_file, "MAX_ENTRIES", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(
        header(0, 2) + key("k", ARRAY, array(0, 600, bytes(600))) + key("l", ARRAY, array(0, 401, bytes(401)))
    )
    with pytest.raises(LoadError, match="metadata l: the arrays of the header have more than 1000 entries"):
        GGUFFile(path)


def test_a_sparse_file_of_a_terabyte_costs_nothing(tmp_path: pathlib.Path) -> None:
    """With as much data as it claims, only the header is looked at."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header(1, 0) + tensor("t", [2**38], F32, 0))
    with path.open("r+b") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("the file system has no such large files")
    with bounded(), pytest.raises(LoadError, match=r"tensor t of shape|cannot read"):  # the map may be refused
        GGUFFile(path)


def test_memory_of_the_process(tmp_path: pathlib.Path) -> None:
    """What tracemalloc does not see: the process may not even have the memory that headers claim."""
    for name, (content, _) in HOSTILE.items():
        (tmp_path / f"{name.replace('*', '')}.gguf").write_bytes(content)
    code = (
        "import pathlib, resource, sys\n"
        "from octavo.models_flax.checkpoint.gguf_file import GGUFFile\n"
        "from octavo.configs.errors import LoadError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in pathlib.Path(sys.argv[1]).glob('*.gguf'):\n"
        "    try:\n        GGUFFile(path)\n"
        "    except LoadError:\n        pass\n"
        "    else:\n        raise SystemExit(f'{path} was accepted')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, timeout=120)
    scale = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout) * scale < 8 << 20


def test_every_cut_of_a_valid_file_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {"a": 1, "b": ["x", "yé"], "c": [1.5]}, {"t": (np.ones((2, 32), np.float32), "Q8_0")})
    content = path.read_bytes()
    assert GGUFFile(path).metadata == {"a": 1, "b": ["x", "yé"], "c": [1.5]}
    end_of_data = GGUFFile(path).tensors["t"].offset + GGUFFile(path).tensors["t"].num_bytes
    for length in range(end_of_data):
        path.write_bytes(content[:length])
        with pytest.raises(LoadError):
            GGUFFile(path)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model with its tokenizer, up to where the data begins."""
    path = tmp_path_factory.mktemp("valid") / "model.gguf"
    write_tiny_gguf(BY_NAME["llama-tied"], path, "Q8_0")
    return path.read_bytes()[: min(tensor.offset for tensor in GGUFFile(path).tensors.values()) + 4096]


def read_all(path: pathlib.Path) -> None:
    """All that is read of a file before its weights."""
    try:
        source = resolve(str(path))
        ModelConfig.from_hf(source.config)
        source.open_tensors()
        tokenizer_from_gguf(source.gguf_metadata or {})
    except (LoadError, ConfigError):
        pass


NUMBERS = st.sampled_from([0, 1, 2, 3, 13, 31, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1])
DAMAGES = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 2**20), st.integers(0, 7)),
        st.tuples(st.just("number"), st.integers(0, 2**20), NUMBERS),
        st.tuples(st.just("cut"), st.integers(0, 2**20), st.just(0)),
        st.tuples(st.just("repeat"), st.integers(0, 2**20), st.integers(1, 64)),
        st.tuples(st.just("drop"), st.integers(0, 2**20), st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=DAMAGES, at_start=st.booleans())
def test_damaged_files_are_refused_or_read(
    damages: list[tuple[str, int, int]], at_start: bool, valid: bytes, tmp_path: pathlib.Path
) -> None:
    content = bytearray(valid)
    for damage, place, amount in damages:
        place %= min(len(content), 1500) if at_start else len(content)
        match damage:
            case "flip":
                content[place] ^= 1 << amount
            case "number":
                content[place : place + 8] = amount.to_bytes(8, "little")
            case "cut":
                del content[max(place, 1) :]
            case "repeat":
                content[place:place] = content[place : place + amount]
            case "drop":
                del content[place : place + amount]
        content = content or bytearray(b"G")
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    started = time.monotonic()
    read_all(path)
    assert time.monotonic() - started < 2


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rest=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_bytes_are_refused_or_read(rest: bytes, counts: tuple[int, int], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(*counts) + rest)
    read_all(path)
