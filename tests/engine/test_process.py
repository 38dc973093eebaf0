"""The engine process's loop and its end of the socket, in this process; the core is ours, the parent a bare socket."""

import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from octavo.engine import messages
from octavo.engine.errors import EngineDeadError, RequestError
from octavo.engine.messages import Abort, Add, Hello, Refused, ResetDone, ResetPrefixCache, Step, Stop
from octavo.engine.process import Link, run
from octavo.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from octavo.engine.stats import EngineStats


class FakeCore:
    """Gives each request a token a step, until it has as many as it wants."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.pending: list[TokenEvent] = []
        self.num_steps = 0
        self.scheduler = self

    def add(self, request: Request) -> None:
        if request.prompt_token_ids == [13]:
            raise RequestError("13 is refused", "prompt")
        self.requests[request.request_id] = [0, request.params.max_tokens or 0]

    def abort(self, request_id: str, index: int | None) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.pending.append(TokenEvent(request_id, 0, [], finish_reason=FinishReason.ABORT))

    def step(self) -> list[TokenEvent]:
        self.num_steps += 1
        events, self.pending = self.pending, []
        for name, state in list(self.requests.items()):
            state[0] += 1
            if state[0] == 5000:
                raise EngineDeadError("5000 is too much")
            reason = FinishReason.LENGTH if state[0] == state[1] else None
            events.append(TokenEvent(name, 0, [state[0]], finish_reason=reason))
            if reason is not None:
                del self.requests[name]
        return events

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests or self.pending)

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.requests), generation_tokens=self.num_steps)


class Parent:
    """A parent that reads when a test says so."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 4)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"ipc://{folder}/s"
        self.socket.bind(self.address)
        self.peer = b""

    def read(self, seconds: float = 10) -> messages.FromEngine | None:
        if not self.socket.poll(seconds * 1000):
            return None
        self.peer, frame = self.socket.recv_multipart()
        return messages.decode_from_engine(frame)

    def send(self, message: messages.ToEngine | bytes) -> None:
        frame = message if isinstance(message, bytes) else messages.encode(message)
        self.socket.send_multipart([self.peer, frame])


@pytest.fixture
def parent(tmp_path: pathlib.Path) -> Iterator[Parent]:
    parent = Parent(tmp_path)
    yield parent
    parent.socket.close()
    parent.context.term()


@pytest.fixture
def link(parent: Parent) -> Iterator[Link]:
    link = Link(parent.address)
    link.reply(Hello("token"))
    assert parent.read() == Hello("token")
    yield link
    link.close()


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def loop(core: FakeCore, link: Link, parent: Parent) -> Iterator[threading.Thread]:
    """The loop in a thread, where nothing but Stop ends it."""
    thread = threading.Thread(target=run, args=(core, link), daemon=True)
    thread.start()
    yield thread
    if thread.is_alive():
        parent.send(Stop())
        while thread.is_alive():
            parent.read(0.1)
    thread.join()


def request(name: str, max_tokens: int, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(request_id=name, prompt_token_ids=list(prompt), params=SamplingParams(max_tokens=max_tokens))


def until(parent: Parent, happened: Callable[[list[messages.FromEngine]], bool]) -> list[messages.FromEngine]:
    read: list[messages.FromEngine] = []
    while not happened(read):
        message = parent.read()
        assert message is not None, f"nothing more behind {read[-3:]}"
        read.append(message)
    return read


def tokens_of(read: list[messages.FromEngine], name: str) -> list[int]:
    steps = [message for message in read if isinstance(message, Step)]
    return [token for step in steps for event in step.events if event.request_id == name for token in event.token_ids]


def ends_of(read: list[messages.FromEngine]) -> dict[str, FinishReason]:
    events = [event for message in read if isinstance(message, Step) for event in message.events]
    return {event.request_id: event.finish_reason for event in events if event.finish_reason is not None}


def test_requests_run_to_their_end(loop: threading.Thread, parent: Parent) -> None:
    for name in "ab":
        parent.send(Add(request(name, 50)))
    read = until(parent, lambda read: len(ends_of(read)) == 2)
    assert tokens_of(read, "a") == tokens_of(read, "b") == list(range(1, 51))
    last = read[-1]
    assert isinstance(last, Step) and last.stats.running == 0


def test_refusals_aborts_and_resets(loop: threading.Thread, parent: Parent) -> None:
    parent.send(Add(request("bad", 5, (13,))))
    assert parent.read() == Refused("bad", "13 is refused", "prompt")
    parent.send(Abort("nobody"))
    parent.send(Abort("nobody", 3))
    parent.send(ResetPrefixCache(7))
    assert until(parent, lambda read: ResetDone(7, True) in read)
    parent.send(Add(request("a", 999)))
    parent.send(Abort("a"))
    parent.send(Abort("a"))
    read = until(parent, lambda read: bool(ends_of(read)))
    assert ends_of(read) == {"a": FinishReason.ABORT}


def test_junk_is_dropped_and_the_loop_goes_on(
    loop: threading.Thread, parent: Parent, caplog: pytest.LogCaptureFixture
) -> None:
    for junk in (b"", b"junk", b"\x80\x04\x95pickle", messages.PREFIX + b"\xc1", messages.encode(Hello("x"))):
        parent.send(junk)
    fields = msgspec.to_builtins(request("half", 5)) | {"priority": "high"}
    parent.send(messages.PREFIX + msgspec.msgpack.encode(["Add", fields]))
    refused = parent.read()
    assert isinstance(refused, Refused) and refused.request_id == "half" and "priority" in refused.message
    assert len([r for r in caplog.records if "ignored a message" in r.message]) == 6
    parent.send(Add(request("a", 3)))
    assert ends_of(until(parent, lambda read: bool(ends_of(read)))) == {"a": FinishReason.LENGTH}


def test_it_sleeps_when_idle_and_wakes_at_once(loop: threading.Thread, parent: Parent, core: FakeCore) -> None:
    def round_trip() -> float:
        began = time.perf_counter()
        parent.send(ResetPrefixCache(1))
        assert parent.read() == ResetDone(1, True)
        return time.perf_counter() - began

    round_trip()
    spent, steps = time.thread_time(), core.num_steps
    process = time.process_time()
    time.sleep(0.5)
    others = time.process_time() - process - (time.thread_time() - spent)
    assert others < 0.1 and core.num_steps == steps
    assert sorted(round_trip() for _ in range(20))[5] < 0.01  # under 1 ms on a machine with nothing else to do


def test_a_parent_that_does_not_read_holds_nothing_up(link: Link, parent: Parent, core: FakeCore) -> None:
    """Steps go on; what waits is one joined event a sample; it comes in order when the parent reads again."""
    core.add(request("a", 4000))
    core.add(request("b", 3500))
    for _ in range(3000):
        link.add(core.step())
        link.flush(core.stats())
    assert set(link._joined) == {("a", 0), ("b", 0)} and not link._events and len(link._replies) == 0
    link.reply(ResetDone(1, False))
    read: list[messages.FromEngine] = []
    while core.has_unfinished or link._has_waiting:
        if (message := parent.read(0.01)) is not None:
            read.append(message)
        link.add(core.step())
        link.flush(core.stats())
    read += until(parent, lambda more: len(ends_of([*read, *more])) == 2)
    assert ResetDone(1, False) in read
    assert tokens_of(read, "a") == list(range(1, 4001)) and tokens_of(read, "b") == list(range(1, 3501))
    assert len(read) < 2000  # the system's buffers hold some hundreds


def test_the_loop_waits_for_a_parent_without_work(loop: threading.Thread, parent: Parent, core: FakeCore) -> None:
    """All is done and the parent has no room: the rest goes out once it has."""
    parent.send(Add(request("a", 4000)))
    while core.num_steps < 4000:
        time.sleep(0.01)
    read = until(parent, lambda read: bool(ends_of(read)))
    assert tokens_of(read, "a") == list(range(1, 4001)) and len(read) < 2000


def test_what_the_core_raises_ends_the_loop(link: Link, parent: Parent, core: FakeCore) -> None:
    core.add(request("a", 6000))
    with pytest.raises(EngineDeadError, match="5000 is too much"):
        run(core, link)


def test_the_first_message_must_be_start(link: Link, parent: Parent) -> None:
    parent.send(Stop())
    with pytest.raises(messages.MessageError, match="Stop, not Start"):
        link.receive_start()
    parent.send(b"OCT\x02" + messages.encode(Stop())[4:])
    with pytest.raises(messages.MessageError, match="version 2, this is version 1"):
        link.receive_start()
