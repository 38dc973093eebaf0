"""The scripted model on disk, and one real server for all tests that leave it as it was."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.references.servers import Server, running, write_model


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the model of tests/references/servers.py."""
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(served_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server without a key, which serves the model as `table` and as `other name`."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running(served_model, log, "--served-model-name", "table", "other name") as server:
        yield server
