"""What a measurement or a report of a fault needs to say about the machine and the versions."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

from octavo.configs import env

PACKAGES = ("octavo", "jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers")


def describe() -> dict[str, Any]:
    """Versions, devices, folders; starts the device's client."""
    import jax

    devices = jax.devices()
    return {
        **versions(),
        "commit": commit() or "unknown",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cache": str(env.cache_dir()),
    }


def versions() -> dict[str, str]:
    """Of Python and of what decides speed and results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" for changes that are not in it; None outside of a checkout."""
    root = pathlib.Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
