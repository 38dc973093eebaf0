"""No check of ours vanishes under `python -O`: the rooms have no assert statement."""

import ast
import pathlib

import pytest

ROOMS = ("configs", "sharding", "pallas_kernels", "models_flax", "engine", "server")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_do_not_assert(room: str, repository: pathlib.Path) -> None:
    """A5: a refusal written as an assertion is none in an optimised run."""
    wrong = [
        f"{path.relative_to(repository)}:{node.lineno}"
        for path in sorted((repository / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, "\n".join(wrong)
