"""What a benchmark leaves behind: one JSON row with the machine it ran on, and a table for people."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


def use_cores(count: int) -> None:
    """Keeps this process and its children on `count` cores; call it before jax is imported (Linux only)."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def machine() -> dict[str, object]:
    """CPU, cores in use and versions."""
    model = platform.processor()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "octavo": importlib.metadata.version("octavo"),
    }


def write_row(name: str, row: dict[str, object], device: str = "cpu") -> pathlib.Path:
    """Writes results/<device>/<name>.json, replacing the last run's."""
    path = RESULTS / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path.write_text(json.dumps({"benchmark": name, "date": date, **machine(), **row}, indent=2) + "\n")
    return path


def merge_rows(path: pathlib.Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes `head` and rows that have a "case"; the file's rows of other cases stay, before the new ones.

    A row that stays from a run of another commit or day says so itself.
    """
    named = {row["case"] for row in rows}
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    origin = {key: old[key] for key in ("commit", "date") if key in old and old[key] != head.get(key)}
    kept = [{**row, **{key: row.get(key, value) for key, value in origin.items()}} for row in old["rows"]]
    kept = [row for row in kept if row["case"] not in named]
    notes = {"notes": old["notes"]} if kept and "notes" in old else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, **notes, "rows": kept + rows}, indent=1) + "\n")


def print_table(rows: list[tuple[str, ...]]) -> None:
    """The first row is the head; columns after the first are right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        print("  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))]))
