"""`octavo` as it is, which counts what lives in its process when it gets SIGUSR1.

`OCTAVO_TEST_COUNTS` names the file for the counts, `OCTAVO_TEST_ENGINE` a module to run instead of the engine process.
"""

import asyncio
import collections
import gc
import json
import os
import pathlib
import signal
import sys

from octavo.engine import connection
from octavo.server import cli

COUNTED = ("RequestStream", "RequestState", "BoundedProtocol", "RequestResponseCycle", "TCPTransport")


def main() -> int:
    """Runs the command line."""
    if module := os.environ.get("OCTAVO_TEST_ENGINE"):
        connection.MODULE = module
    if path := os.environ.get("OCTAVO_TEST_COUNTS"):
        signal.signal(signal.SIGUSR1, lambda *_: _write(pathlib.Path(path)))
    return cli.main()


def _write(path: pathlib.Path) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_counts()))
    part.rename(path)


def _counts() -> dict[str, int]:
    """What is alive: unfinished tasks, whoever holds them, and the objects of requests and connections.

    (Of what was made since the server listened: older objects are frozen, and the collector does not list them.)
    """
    gc.collect()
    alive = gc.get_objects()
    kinds = collections.Counter(type(item).__name__ for item in alive)
    tasks = sum(not item.done() for item in alive if issubclass(type(item), asyncio.Task))
    return {"tasks": tasks} | {name: kinds[name] for name in COUNTED}


if __name__ == "__main__":
    sys.exit(main())
