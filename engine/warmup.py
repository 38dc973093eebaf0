"""Compiles the ladder ahead of time, coarse programs before serving, the rest behind it.

A program that is ready is a compiled executable: calling it never traces or compiles.
"""

import concurrent.futures
import dataclasses
import logging
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
from tqdm import tqdm

from octavo.engine.buckets import Ladder, Program

logger = logging.getLogger(__name__)

type Compiled = Callable[..., Any]


def use_compilation_cache(folder: pathlib.Path | None) -> None:
    """Keeps compiled programs in a folder that exists. None leaves jax's settings as they are."""
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program counts: a start with a warm cache should compile nothing at all.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass
class WarmUp:
    """Turns the programs of a ladder into executables.

    Attributes:
      ladder: `ready` grows as programs are compiled.
      compile: makes one; called in threads.
      busy: whether requests wait right now; the background holds back while they do.
      progress: show a bar for the part that start-up waits for.
    """

    ladder: Ladder
    compile: Callable[[Program], Compiled]
    busy: Callable[[], bool]
    progress: bool
    programs: dict[Program, Compiled] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._closed = threading.Event()
        self._publishing = threading.Lock()  # several threads compile at once, and none may undo another's entry
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self._error: BaseException | None = None

    def start(self, *, wait_for_all: bool) -> None:
        """Compiles the coarse and early programs, or all; the others follow in a thread."""
        first = self.ladder.programs if wait_for_all else (*self.ladder.coarse, *self.ladder.early)
        rest = [p for p in self.ladder.programs if p not in first]
        began = time.perf_counter()
        workers = min(len(first), os.cpu_count() or 1, 8)
        with (
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
            tqdm(total=len(first), desc="Compiling", unit="program", disable=not self.progress) as bar,
        ):
            for done in concurrent.futures.as_completed([pool.submit(self._make, p) for p in first]):
                done.result()
                bar.update()
        logger.info(
            "%d of %d step programs ready in %.1f s", len(first), len(self.ladder.programs), time.perf_counter() - began
        )
        if rest:
            self._thread = threading.Thread(target=self._background, args=(rest,), name="octavo-warm-up", daemon=True)
            self._thread.start()
            # Also at the interpreter's exit: a process that ends while XLA compiles in a thread crashes.
            self._stop = weakref.finalize(self, _stop, self._closed, self._thread)

    def wait(self, timeout: float | None = None) -> None:
        """Returns when every program is ready.

        Raises:
          TimeoutError: after `timeout` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"programs still compile after {timeout} s")
        if self._error is not None:
            raise RuntimeError("a program did not compile in the background") from self._error

    def close(self) -> None:
        """Stops after the program in hand."""
        self._closed.set()
        if self._stop is not None:
            self._stop()

    def _background(self, rest: list[Program]) -> None:
        for program in rest:
            while self.busy() and not self._closed.wait(0.02):
                pass
            if self._closed.is_set():
                return
            try:
                self._make(program)
            except Exception as error:  # the coarse programs go on serving
                self._error = error
                logger.exception("compiling %s in the background failed; coarser programs serve instead", program)
                return

    def _make(self, program: Program) -> None:
        compiled = self.compile(program)
        with self._publishing:
            self.programs[program] = compiled
            self.ladder.ready = self.ladder.ready | {program}


def _stop(closed: threading.Event, thread: threading.Thread) -> None:
    """A compilation cannot be interrupted, so this can take seconds."""
    closed.set()
    if thread.is_alive():
        logger.warning("waiting for the program that is being compiled")
        thread.join()
