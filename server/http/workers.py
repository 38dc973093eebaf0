"""A few threads for what would hold up the event loop: large JSON, chat templates, tokenising.

Bounded, so a slow rendering takes one thread and the sandbox ends it; the loop and the other threads go on.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable

NUM_THREADS = 4


class Workers:
    """The threads of one server."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-text")

    async def run[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a function that runs in one of the threads; if the caller is cancelled, nobody waits for it."""
        future = self._pool.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        finally:
            future.cancel()

    def close(self) -> None:
        """Takes nothing more. What runs ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
