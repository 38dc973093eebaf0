"""The one place that reads (and, before the device starts, sets) environment variables."""

import os
import pathlib


def cache_dir() -> pathlib.Path:
    """Where compiled programs and measured sizes are kept: $OCTAVO_CACHE_DIR or the user's cache folder."""
    if path := os.environ.get("OCTAVO_CACHE_DIR"):
        return pathlib.Path(path)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "octavo"


def api_key() -> str | None:
    """$OCTAVO_API_KEY: one key of the server that stands in no command line; None where it is unset or empty."""
    return os.environ.get("OCTAVO_API_KEY") or None


def reserve_device_memory(fraction: float) -> None:
    """Lets the allocator of a GPU take `fraction` of its memory; has an effect before the first use of a device.

    A value that the user has set stays.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{fraction:.3f}")
