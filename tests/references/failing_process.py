"""The engine process with a fault: `OCTAVO_TEST_FAULT` names it. Stands in for octavo.engine.process in tests."""

import os
import signal
import sys

from octavo.engine import process
from octavo.engine.messages import Hello


def main() -> int:
    """Runs the engine process, broken."""
    fault = os.environ["OCTAVO_TEST_FAULT"]
    if fault == "exits before it connects":
        return 3
    if fault == "speaks another version":
        process.messages.PREFIX = b"OCT\x63"
    if fault == "dies while it loads":
        from octavo.engine import startup

        startup.load_model = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    if fault == "has no memory":
        from octavo.engine import startup

        def load(*args: object, **options: object) -> object:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

        startup.load_model = load
    if fault == "device fails":
        _break_the_device()
    if fault == "shows a wrong token":
        process.Hello = lambda token: Hello("0" * len(token))
    return process.main(sys.argv[1:])


def _break_the_device() -> None:
    """The fortieth result of the device never comes."""
    from octavo.engine.runner import Runner

    fetch, calls = Runner.fetch, iter(range(1000))

    def broken(self: Runner, sampled: object) -> object:
        if next(calls) == 40:
            raise RuntimeError("INTERNAL: the device is gone")
        return fetch(self, sampled)

    Runner.fetch = broken


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
