"""The package map in pyproject.toml equals the tree, and a wheel holds all of it."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = list(PROJECT["tool"]["setuptools"]["package-dir"].values())

# Declared ahead of their first import, because the design is built on them.
NOT_IMPORTED_YET = {"httptools", "jaxtyping", "orbax-checkpoint"}


def tree_packages() -> set[str]:
    return {
        "octavo." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }


def shipped_files() -> set[str]:
    """What must be in a wheel: modules, markers and data."""
    return {
        "octavo/" + path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".typed", ".toml", ".json"}
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel built from a copy, so that no build folder appears in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return source / done.stdout.split()[-1]


def test_every_folder_is_a_declared_package() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == tree_packages()


def test_every_module_lies_in_a_package() -> None:
    lost = [str(p) for room in ROOMS for p in (ROOT / room).rglob("*.py") if not (p.parent / "__init__.py").exists()]
    assert not lost, f"no __init__.py beside {lost}"


def test_symlinks_for_type_checkers() -> None:
    links = ROOT / ".ci" / "types" / "octavo"
    assert {link.name: link.resolve() for link in links.iterdir()} == {room: ROOT / room for room in ROOMS}


def test_wheel_holds_everything(wheel: pathlib.Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == shipped_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_imports_without_the_checkout(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import octavo.configs.engine as module; print(module.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith(str(tmp_path)), done.stdout + done.stderr


def test_console_script_is_installed(tmp_path: pathlib.Path) -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="octavo")
    assert script.value == PROJECT["project"]["scripts"]["octavo"]
    command = pathlib.Path(sys.executable).with_name("octavo")
    done = subprocess.run([command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def normal(requirement: str) -> str:
    """The name in a requirement as package indexes write it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def test_what_is_imported_is_declared() -> None:
    providers = importlib.metadata.packages_distributions()
    imported: dict[str, str] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    top = name.partition(".")[0]
                    if top not in sys.stdlib_module_names and top != "octavo":
                        imported[normal(providers[top][0])] = f"{path.relative_to(ROOT)}:{node.lineno}"
    declared = {normal(requirement) for requirement in PROJECT["project"]["dependencies"]}
    assert not {name: where for name, where in imported.items() if name not in declared}
    assert declared - set(imported) <= NOT_IMPORTED_YET


def test_pins_cover_the_dependencies() -> None:
    lines = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["test"]
    missing = {normal(requirement) for requirement in wanted} - {normal(pin) for pin in pins}
    assert not missing, f"run `make lock`: {missing}"
    assert pins["jax"] == "0.11.2"
