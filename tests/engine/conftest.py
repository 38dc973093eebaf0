"""Tiny engines: a checkpoint on disk, a ladder of a few programs, everything compiled before the test."""

import pathlib
from collections.abc import Iterator

import pytest

from octavo.configs.engine import EngineConfig
from octavo.engine import Engine
from octavo.engine.core import EngineCore
from octavo.engine.kv_groups import KVGroups
from octavo.engine.scheduler import Scheduler
from tests.references.tiny_models import BY_NAME, write_checkpoint

SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 128,
    "decode_rungs": (4,),
    "token_rungs": (48,),
    "warmup": "full",
    "max_logprobs": 5,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """A function from the name of a tiny model to its directory."""
    written: dict[str, pathlib.Path] = {}

    def get(name: str = "llama-gqa") -> pathlib.Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("checkpoints") / name
            write_checkpoint(BY_NAME[name], written[name])
        return written[name]

    return get


@pytest.fixture
def make_core(checkpoint):
    """A function that starts an engine core on a tiny model; all are closed at the end.

    `pool`: blocks that the scheduler may use. The device's cache keeps its size, so that the programs
    of other tests serve here as well.
    """
    cores = []

    def make(model: str = "llama-gqa", pool: int | None = None, **options) -> EngineCore:
        core = EngineCore(EngineConfig(model=str(checkpoint(model)), **(SMALL | options)))
        if pool is not None:
            groups = KVGroups([pool], [core.config.block_size])
            core.scheduler = Scheduler(core.scheduler.config, core.runner.warm_up.ladder, groups)
        cores.append(core)
        return core

    yield make
    for core in cores:
        core.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did with a module's engine, nothing runs afterwards and every block is free."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        for _ in range(10):
            if engine.core.has_unfinished:
                engine.step()
        assert not engine.core.has_unfinished
        engine.core.scheduler.check_invariants()


@pytest.fixture(scope="module")
def shared_core(checkpoint):
    """One engine for a module's tests; a test must leave it idle."""
    core = EngineCore(EngineConfig(model=str(checkpoint()), **SMALL))
    yield core
    core.close()
