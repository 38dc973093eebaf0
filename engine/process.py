"""The engine process: an EngineCore in the main thread that is told what to do over a socket.

Started by `engine/connection.py` as `python -m octavo.engine.process`, and by nobody else: its arguments are
the socket's address and the parent's process id, and the first line of its standard input is the token
that it shows there. It ends when it is told to, when the engine fails, and when its parent is gone.
"""

import collections
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import zmq

from octavo.engine import messages
from octavo.engine.errors import EngineDeadError, OctavoError, RequestError
from octavo.engine.messages import (
    Abort,
    Add,
    Failed,
    Hello,
    Message,
    Ready,
    Refused,
    ResetDone,
    ResetPrefixCache,
    Start,
    Step,
    Stop,
)
from octavo.engine.request import TokenEvent
from octavo.engine.stats import EngineFacts, EngineStats

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore

logger = logging.getLogger(__name__)

LINGER = 2000  # milliseconds to get the last words out
MAX_QUEUED_FRAMES = 16
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(arguments: list[str]) -> int:
    """Runs one engine; returns the exit status."""
    address, parent = arguments
    # Ctrl-C and a service manager's SIGTERM reach the whole group: what they mean is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(int(parent))
    token = _read_line()
    threading.Thread(target=_wait_for_end_of_input, name="octavo-parent", daemon=True).start()
    link = Link(address)
    link.reply(Hello(token))
    status = _serve(link)
    link.close()
    return status


def _serve(link: "Link") -> int:
    """Loads a model and serves it; returns the exit status."""
    try:
        from octavo.engine.core import EngineCore  # takes seconds: imports jax

        start = link.receive_start()
        logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("octavo").setLevel(start.log_level)
        core = EngineCore(start.config, progress=start.progress, sampled_vocab_size=start.sampled_vocab_size)
        gc.collect()
        gc.freeze()  # what is there now stays: collections need not look at it again
        link.reply(Ready(make_facts(core)))
        run(core, link)
    except EngineDeadError as error:
        logger.error("%s", error, exc_info=error)
        link.reply(Failed("EngineDeadError", str(error)))
        return 1
    except OctavoError as error:  # no traceback: the parent says what is wrong
        link.reply(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine process failed")
        link.reply(Failed("EngineDeadError", f"the engine stopped: {type(error).__name__}: {error}"))
        return 1
    return 0


def run(core: "EngineCore", link: "Link") -> None:
    """The loop: what came in, a step, what came out. Without work it sleeps until a message comes."""
    while True:
        for message in link.receive(wait=not core.has_unfinished):
            match message:
                case Add(request):
                    try:
                        core.add(request)
                    except RequestError as error:
                        link.reply(Refused(request.request_id, str(error), error.field))
                case Abort(request_id, index):
                    core.abort(request_id, index)
                case ResetPrefixCache(call):
                    link.reply(ResetDone(call, core.scheduler.reset_prefix_cache()))
                case Stop():
                    return
                case Start():
                    logger.warning("ignored a second start")
        if core.has_unfinished:
            link.add(core.step())
        link.flush(core.stats())


def make_facts(core: "EngineCore") -> EngineFacts:
    """What the parent must know of a core that is ready."""
    import jax

    return EngineFacts(
        limits=core.scheduler.limits,
        max_length=core.max_length,
        max_num_seqs=core.resolved.max_num_seqs,
        max_num_batched_tokens=core.resolved.max_num_batched_tokens,
        block_size=core.config.block_size,
        num_blocks=core.num_blocks,
        dtype=core.resolved.dtype,
        kv_dtype=core.resolved.kv_dtype,
        platform=core.resolved.platform,
        device_kind=jax.devices()[0].device_kind,
        architecture=core.model_config.architecture,
        eos_token_ids=core.model_config.eos_token_ids,
        default_sampling_params=core.default_sampling_params,
    )


class Link:
    """The process's end of the socket: never blocks on a parent that does not read, and never grows for it.

    Args:
      address: where the parent listens.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # requests are bounded where they are submitted
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a parent that is gone does not come back
        self._socket.connect(address)
        self._replies: collections.deque[Message] = collections.deque()
        self._events: list[TokenEvent] = []  # of the last steps, in order
        self._joined: dict[tuple[str, int], list[TokenEvent]] = {}  # of earlier ones that the parent had no room for
        self._stats = EngineStats()
        self._sent = self._stats

    def receive_start(self) -> Start:
        """Waits for the first message.

        Raises:
          MessageError: it is something else, or of another version.
        """
        message = messages.decode_to_engine(self._socket.recv())
        if not isinstance(message, Start):
            raise messages.MessageError(f"the first message is {type(message).__name__}, not Start")
        return message

    def receive(self, *, wait: bool) -> list[messages.ToEngine]:
        """All messages that came; `wait`: until there is one, or until the parent reads again."""
        if wait:
            self._socket.poll(None, zmq.POLLIN | (zmq.POLLOUT if self._has_waiting else 0))
        received: list[messages.ToEngine] = []
        # Asked before, as at the other end: an exception for "nothing more" costs twice as much as the question.
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frame = self._socket.recv(zmq.NOBLOCK)
            try:
                received.append(messages.decode_to_engine(frame))
            except messages.MessageError as error:
                logger.error("ignored a message: %s", error)
                if (request_id := messages.request_id_of(frame)) is not None:
                    self.reply(Refused(request_id, str(error)))
        return received

    def reply(self, message: Message) -> None:
        """Sends an answer, before whatever else waits."""
        self._replies.append(message)
        self._send_waiting()

    def add(self, events: list[TokenEvent]) -> None:
        """Takes a step's events."""
        self._events += events

    def flush(self, stats: EngineStats) -> None:
        """Sends what there is, if the parent has room; otherwise a sample's events are joined until it has."""
        self._stats = stats
        self._send_waiting()

    @property
    def _has_waiting(self) -> bool:
        return bool(self._replies or self._events or self._joined or self._stats != self._sent)

    def _send_waiting(self) -> None:
        while self._has_waiting:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                for event in self._events:
                    self._joined.setdefault((event.request_id, event.index), []).append(event)
                self._events = []
                return
            if self._replies:
                message = self._replies.popleft()
            else:
                message = Step([*map(join_events, self._joined.values()), *self._events], self._stats)
                self._joined, self._events, self._sent = {}, [], self._stats
            self._socket.send(messages.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Gets the last words out and closes."""
        self._socket.setsockopt(zmq.SNDTIMEO, LINGER)
        with contextlib.suppress(zmq.Again):
            while self._replies:
                self._socket.send(messages.encode(self._replies.popleft()))
        self._socket.close(linger=LINGER)
        self._context.term()


def join_events(events: list[TokenEvent]) -> TokenEvent:
    """One event for consecutive ones of a sample."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    logprobs = [entry for event in events if event.logprobs is not None for entry in event.logprobs]
    return TokenEvent(
        last.request_id,
        last.index,
        [token for event in events for token in event.token_ids],
        logprobs if any(event.logprobs is not None for event in events) else None,
        next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None),
        last.finish_reason,
        last.stop_reason,
        last.num_cached_tokens,
        last.scheduled_time,
        last.error,
    )


def _die_with(parent: int) -> None:
    """Asks Linux to end this process with its parent, also while a compiler holds every thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it is gone already


def _read_line() -> str:
    """The first line of standard input; no buffer may hold what comes behind it."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            os._exit(1)
        line += part
    return line.decode().strip()


def _wait_for_end_of_input() -> None:
    """The parent holds the other end of the pipe for as long as it lives."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # At once: an orderly end would wait for a program that is being compiled, and a device that failed may hang in it.
    os._exit(exit_status)
