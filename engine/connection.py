"""The API process's end of the engine process: starts it, talks to it, sees it die, and leaves nothing of it behind.

Knows messages but not what they mean. The socket can only be found until the process that was started has
connected; whoever else connects before that is logged and not listened to.
"""

import asyncio
import contextlib
import logging
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import zmq

from octavo.engine.errors import EngineDeadError
from octavo.engine.messages import FromEngine, Hello, MessageError, Stop, ToEngine, decode_from_engine, encode

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 60.0  # seconds for an interpreter to start; a loaded machine takes some
STOP_TIMEOUT = 4.0  # seconds that the process gets to end by itself: the step in hand can be a long one
MAX_QUEUED_FRAMES = 16  # that were not read yet; behind these the engine joins its steps
SOCKET = "engine"
MODULE = "octavo.engine.process"
MAX_PATH = 100  # bytes of a socket's path; 104 or 108 is the limit of systems


class EngineConnection:
    """One engine process.

    Args:
      on_message: gets every message but Hello, on the event loop.
      on_exit: gets what became of the process, once, on the event loop, behind its last message.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_exit: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._token = secrets.token_hex(16)
        self._peer: bytes | None = None
        self._strangers: set[bytes] = set()
        self._folder: pathlib.Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._connected = self._loop.create_future()
        self._exited = asyncio.Event()
        self._closed = False
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # requests are bounded where they are submitted
        self._fd = int(self._socket.getsockopt(zmq.FD))

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._process is None or self._exited.is_set() else self._process.pid

    async def open(self) -> None:
        """Starts the process and waits until it has connected.

        Raises:
          EngineDeadError: it ended before, or is too slow.
        """
        address = self._bind()
        self._loop.add_reader(self._fd, self._receive)
        optimize = ["-O"] * sys.flags.optimize  # checks must hold there as well; the child runs what the parent runs
        command = [sys.executable, "-P", *optimize, "-m", MODULE, address, str(os.getpid())]
        # Its standard output is our standard error: that is where logs and progress bars belong.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
        self._watcher = threading.Thread(
            target=self._watch, args=(self._process,), name="octavo-engine-exit", daemon=True
        )
        self._watcher.start()
        try:
            if self._process.stdin is None:
                raise EngineDeadError("the engine process has no standard input")
            with contextlib.suppress(BrokenPipeError):  # it is dead already, which the watcher sees
                self._process.stdin.write(self._token.encode() + b"\n")
                self._process.stdin.flush()
            await asyncio.wait_for(asyncio.shield(self._connected), HELLO_TIMEOUT)
        except TimeoutError:
            raise EngineDeadError(f"the engine process did not connect within {HELLO_TIMEOUT:.0f} s") from None
        # Nobody else finds it from here on. (Unbinding would end the connection that exists.)
        self._remove_folder()

    def send(self, message: ToEngine) -> None:
        """Queues a message; nothing waits. One for a process that is gone is dropped: `on_exit` says so.

        Raises:
          MessageError: it cannot be encoded.
        """
        frame = encode(message)
        if self._closed or self._peer is None or self._exited.is_set():
            return
        with contextlib.suppress(zmq.ZMQError):  # no route: it is gone
            self._socket.send_multipart([self._peer, frame], zmq.NOBLOCK)
        # Sending may take notice of what came in, and the descriptor then does not become readable for it.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    async def close(self, *, kill: bool = False) -> None:
        """Ends the process, by force if it does not listen, and removes all that was made. May be called again."""
        if not self._closed and not kill and self._peer is not None:
            self.send(Stop())
        process, self._closed = self._process, True
        try:
            if process is not None and not kill:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._exited.wait(), STOP_TIMEOUT)
            if process is not None and not self._exited.is_set():
                process.kill()
                await self._exited.wait()
        finally:
            self._remove(process)

    def _remove(self, process: subprocess.Popen[bytes] | None) -> None:
        """Also when closing was interrupted: then by force."""
        if process is not None:
            if process.poll() is None:
                process.kill()
            if self._watcher is not None:
                self._watcher.join()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)
            self._context.term()
        if not self._connected.done():
            self._connected.cancel()
        self._remove_folder()

    def _bind(self) -> str:
        """Opens the socket in a folder that only this user may enter, or on the loopback where there is no ipc."""
        if zmq.has("ipc"):
            for base in (None, "/tmp"):
                try:
                    folder = pathlib.Path(tempfile.mkdtemp(prefix="octavo-", dir=base))  # mode 0700
                except OSError as error:
                    logger.warning("no folder for the engine's socket in %s: %s", base or "TMPDIR", error.strerror)
                    continue
                path = folder / SOCKET
                if len(os.fsencode(path)) <= MAX_PATH:
                    self._folder = folder
                    self._socket.bind(f"ipc://{path}")
                    return f"ipc://{path}"
                folder.rmdir()
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def _remove_folder(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / SOCKET).unlink()
            with contextlib.suppress(FileNotFoundError):
                self._folder.rmdir()
            self._folder = None

    # What comes in.

    def _receive(self) -> None:
        # Asked before, because an exception for "nothing more" would cost twice as much as the question.
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._take(frames[0], frames[1:])

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        if self._peer is not None and peer != self._peer:
            self._ignore(peer, "another process speaks to the engine's socket")
            return
        try:
            if len(frames) != 1:
                raise MessageError(f"{len(frames)} frames where a message is one")
            message = decode_from_engine(frames[0])
        except MessageError as error:
            self._ignore(peer, str(error))
            return
        if self._peer is None:
            if isinstance(message, Hello) and secrets.compare_digest(message.token.encode(), self._token.encode()):
                self._peer = peer
                self._connected.set_result(None)
            else:
                self._ignore(peer, "it is not the process that was started")
            return
        self._on_message(message)

    def _ignore(self, peer: bytes, why: str) -> None:
        """Says it once a peer."""
        if peer not in self._strangers and len(self._strangers) < 100:
            self._strangers.add(peer)
            logger.warning("ignored a message on the engine's socket: %s", why)

    # Its end.

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread: nothing else learns of a child's end at once, on every system and event loop."""
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._see_exit, status)

    def _see_exit(self, status: int) -> None:
        # What it said last may still be on its way through the socket's thread.
        self._loop.call_later(0.05, self._finish, status)

    def _finish(self, status: int) -> None:
        self._receive()
        self._exited.set()
        what = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        if not self._connected.done() and not self._closed:
            self._connected.set_exception(EngineDeadError(f"the engine process {what} before it connected"))
        self._on_exit(what)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
