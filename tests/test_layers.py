"""Imports point down, and the few other rules that a syntax tree can show."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# server -> engine -> models_flax -> {pallas_kernels, sharding} -> configs
BELOW = {
    "configs": set[str](),
    "sharding": {"configs"},
    "pallas_kernels": {"configs"},
    "models_flax": {"configs", "sharding", "pallas_kernels"},
    "engine": {"configs", "sharding", "pallas_kernels", "models_flax"},
    "server": {"configs", "sharding", "pallas_kernels", "models_flax", "engine"},
}
TOKEN_IDS_ONLY = ("core", "scheduler", "runner")
TEXT_LIBRARIES = {"tokenizers", "transformers", "jinja2"}


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def files(room: str) -> list[pathlib.Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", BELOW)
def test_imports_point_down(room: str) -> None:
    wrong = []
    for path in files(room):
        for line, name in imported(parse(path)):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top in BELOW:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} instead of octavo.{name}")
            elif top == "octavo" and target and target != room and target not in BELOW[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} reaches up to {name}")
    assert not wrong, "\n".join(wrong)


def source_of(name: str) -> pathlib.Path | None:
    """The file behind a dotted name of ours; None for a name inside a module, and for a room's own __init__."""
    path = ROOT.joinpath(*name.split(".")[1:])
    candidates = [path.with_suffix(".py")] + ([path / "__init__.py"] if name.count(".") > 1 else [])
    return next((c for c in candidates if c.is_file()), None)


def test_the_core_speaks_token_ids_only() -> None:
    """Nothing that core, scheduler or runner import, directly or not, is in engine/text or reads text itself."""
    wrong = []
    for start in TOKEN_IDS_ONLY:
        chains = [(f"octavo.engine.{start}",)]
        seen = set()
        while chains:
            chain = chains.pop()
            name = chain[-1]
            if name in seen:
                continue
            seen.add(name)
            if name.startswith("octavo.engine.text") or name.partition(".")[0] in TEXT_LIBRARIES:
                wrong.append(" -> ".join(chain))
            elif name.startswith("octavo.") and (path := source_of(name)):
                chains += [(*chain, target) for _, target in imported(parse(path))]
        assert len(seen) > 5, f"octavo.engine.{start} was not found"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BELOW)
def test_modules_import_modules_of_their_own_room(room: str) -> None:
    """`from octavo.engine import x` inside engine would run in a circle through its __init__."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(room)
        if path != ROOT / room / "__init__.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module == f"octavo.{room}"
        for alias in node.names
        if not (ROOT / room / f"{alias.name}.py").is_file() and not (ROOT / room / alias.name).is_dir()
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BELOW)
def test_init_files_hold_reexports_only(room: str) -> None:
    wrong = []
    for path in files(room):
        if path.name != "__init__.py":
            continue
        for node in parse(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]
            if not (docstring or names or isinstance(node, ast.ImportFrom)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:60]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BELOW)
def test_environment_is_read_in_one_place(room: str) -> None:
    readers = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    wrong = []
    for path in files(room):
        if path == ROOT / "configs" / "env.py":
            continue
        tree = parse(path)
        named = [(line, name) for line, name in imported(tree) if name in readers]
        used = [
            (node.lineno, f"os.{node.attr}")
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        ]
        wrong += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in named + used if name in readers]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BELOW)
def test_no_torch_and_no_pickle(room: str) -> None:
    refused = {"torch", "torchvision", "pickle", "cloudpickle", "dill"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for line, name in imported(parse(path))
        if name.partition(".")[0] in refused
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", BELOW)
def test_modules_say_what_they_do(room: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in files(room)
        if path.name != "__init__.py" and not ast.get_docstring(parse(path))
    ]
    assert not wrong, f"no docstring: {', '.join(wrong)}"
