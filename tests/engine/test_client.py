"""AsyncEngine on a scripted model, through its own process: results, refusals, aborts, back-pressure, ends."""

import asyncio
import pathlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator

import psutil
import pytest

from octavo.configs.engine import EngineConfig
from octavo.engine import Engine, EngineDeadError, RequestError, SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.errors import QueueFullError
from octavo.engine.observer import FinishedRequest
from octavo.engine.request_stream import RequestStream
from octavo.engine.stats import EngineStats
from octavo.engine.text.output import Piece
from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.table_model import EOS, TableModel, chain

OPTIONS = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 640,
    "decode_rungs": (4,),
    "token_rungs": (48,),
    "max_logprobs": 5,
    "warmup": "full",
}
A, B, C = byte_ids("abc")
# a -> "ObSer" -> "Observ" -> "ation" -> ":" -> " the" -> EOS;  c -> c, with other candidates
SCRIPT = {
    **chain(A, *(piece_id(p) for p in (b"ObSer", b"Observ", b"ation")), *byte_ids(":"), piece_id(b" the"), EOS),
    C: {C: 20.0, A: 15.0, piece_id(b"\xc4\x8f"): 14.0},
}
GREEDY = {"temperature": 0.0}
TEXT = "ObSerObservation: the"
ENDLESS = {"temperature": 0.0, "max_tokens": 2000}  # behind "c"
QUEUED = 3  # max_num_queued_reqs


class Recorder:
    """An observer that keeps everything, and fails when it is told to."""

    def __init__(self) -> None:
        self.stats: list[EngineStats] = []
        self.first: list[float] = []
        self.later: list[float] = []
        self.finished: list[FinishedRequest] = []
        self.broken = False

    def on_stats(self, stats: EngineStats) -> None:
        self.stats.append(stats)
        if self.broken:
            raise ValueError("broken on purpose")

    def on_tokens(self, time_to_first_token: list[float], inter_token_latency: list[float]) -> None:
        self.first += time_to_first_token
        self.later += inter_token_latency

    def on_finished(self, record: FinishedRequest) -> None:
        self.finished.append(record)
        if self.broken:
            raise ValueError("broken on purpose")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    generation_config = {"temperature": 0.5, "max_new_tokens": 7, "eos_token_id": [EOS]}
    return TableModel(table=SCRIPT, generation_config=generation_config).write(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the module's engine."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def server(model: pathlib.Path, runner: asyncio.Runner, recorder: Recorder) -> Iterator[AsyncEngine]:
    """The engine (not called so: tests/engine/conftest.py steps what is called `engine`)."""
    config = EngineConfig(model=str(model), **OPTIONS)
    server = runner.run(AsyncEngine.start(config, max_num_queued_reqs=QUEUED, observer=recorder, progress=False))
    yield server
    runner.run(server.close())


@pytest.fixture(scope="module")
def run(runner: asyncio.Runner, server: AsyncEngine):
    """Runs a scenario on the engine's loop, within bounds; nothing of it may be left."""

    def run[T](scenario: Coroutine[None, None, T], seconds: float = 60) -> T:
        async def bounded() -> T:
            result = await asyncio.wait_for(scenario, seconds)
            await until(lambda: idle(server))
            assert server.num_unfinished == 0 and server._num_samples == 0
            assert len(asyncio.all_tasks()) == 1
            return result

        return runner.run(bounded())

    return run


async def until(happened: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


def idle(server: AsyncEngine) -> bool:
    return (server.stats.running, server.stats.waiting, server.stats.kv_usage) == (0, 0, 0.0)


async def pieces_of(stream: RequestStream) -> list[Piece]:
    return [piece async for piece in stream]


async def text_of(stream: RequestStream) -> str:
    return "".join([piece.text async for piece in stream])


def submit(server: AsyncEngine, prompt: object, **params: object) -> RequestStream:
    return server.submit(server.parse_prompt(prompt), SamplingParams(**params))


def test_streamed_and_whole(server: AsyncEngine, run, model: pathlib.Path) -> None:
    """Both forms, and the offline engine, say the same, all that there is to a request included."""
    everything = {**GREEDY, "n": 2, "logprobs": 2, "prompt_logprobs": 2, "stop": ["zzz"], "seed": 5}
    with Engine(str(model), progress=False, **OPTIONS) as engine:
        (expected,) = engine.generate("a", SamplingParams(**everything), use_tqdm=False)

    async def scenario() -> None:
        stream = submit(server, "a", **everything)
        pieces = await pieces_of(stream)
        for index in range(2):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in mine) == TEXT
            assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
            tables = [table for piece in mine for table in piece.logprobs or []]
            assert tables == expected.outputs[index].logprobs
        assert stream.prompt_logprobs == expected.prompt_logprobs and len(stream.prompt_token_ids) == 1
        output = await submit(server, "a", **everything).output()
        assert output.outputs == expected.outputs and output.finished
        assert output.prompt_logprobs == expected.prompt_logprobs

    run(scenario())


def test_facts_and_defaults(server: AsyncEngine, run) -> None:
    facts = server.facts
    assert (facts.max_model_len, facts.max_length, facts.vocab_size, facts.block_size) == (2048, 2048, 320, 16)
    assert (facts.num_blocks, facts.max_num_seqs, facts.platform) == (640, 4, "cpu")
    assert facts.default_sampling_params == {"temperature": 0.5, "max_tokens": 7}
    assert server.default_params == SamplingParams(temperature=0.5, max_tokens=7)
    assert server.eos_token_ids == (EOS,) and server.tokenizer is server.get_tokenizer()

    async def scenario() -> None:
        output = await server.submit(server.parse_prompt([C])).output()
        assert len(output.outputs[0].token_ids) == 7
        prompt = server.render_chat([{"role": "user", "content": "a"}])
        assert (await server.submit(prompt, SamplingParams(max_tokens=None, **GREEDY)).output()).finished

    run(scenario())


def test_a_stop_string_ends_only_its_sample(server: AsyncEngine, run) -> None:
    """Found in this process, for n > 1: the engine is told which sample; it ends there too."""

    async def scenario() -> None:
        stream = submit(server, "a", **GREEDY, n=3, stop="Observation:", min_tokens=0)
        output = await stream.output()
        assert [o.text for o in output.outputs] == ["ObSer"] * 3
        assert {o.stop_reason for o in output.outputs} == {"Observation:"}
        endless = submit(server, "c", **ENDLESS, stop="c" * 40)
        assert (await endless.output()).outputs[0].text == ""
        await until(lambda: idle(server), 5)  # long before 2000 tokens

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([320], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 2049, {}, "prompt"),
        ([1], {"max_tokens": 2048}, "max_tokens"),
        ([1], {"logprobs": 6}, "logprobs"),
        ([1], {"stop_token_ids": [320]}, "stop_token_ids"),
        ([1], {"bad_words": ["x" * 100_000]}, "bad_words"),
        ([1], {"stop": "\ud800"}, None),
        ({"prompt": "a", "cache_salt": "\ud800"}, {}, None),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_before_it_is_sent(
    server: AsyncEngine, run, prompt: object, params: dict, field: str | None
) -> None:
    async def scenario() -> None:
        with pytest.raises(RequestError) as caught:
            submit(server, prompt, **{"max_tokens": 2, **params})
        assert caught.value.field == field and server.num_unfinished == 0
        assert await text_of(submit(server, "a", **GREEDY)) == TEXT

    run(scenario())


def test_what_the_core_refuses_comes_through_the_stream(server: AsyncEngine, run, monkeypatch) -> None:
    """Its own check is the last word: here, one that this process was made to leave out."""
    monkeypatch.setattr("octavo.engine.client.check_request", lambda request, limits: None)

    async def scenario() -> None:
        stream = submit(server, [320], max_tokens=2)
        with pytest.raises(RequestError, match="token id 320") as caught:
            await anext(stream)
        assert caught.value.field == "prompt"
        with pytest.raises(RequestError, match="token id 320"):
            await submit(server, [320], max_tokens=2).output()

    run(scenario())


def test_aborts_at_every_stage(server: AsyncEngine, run) -> None:
    """Before the first schedule, in the queue, in prefill, in decode, behind the end, and twice."""

    async def scenario() -> None:
        at_once = submit(server, "c", **ENDLESS)
        at_once.abort()
        at_once.abort()
        assert [(p.finish_reason, p.token_ids) for p in await pieces_of(at_once)] == [("abort", [])]

        running = [submit(server, "c", **ENDLESS) for _ in range(4)]
        for stream in running:
            assert (await anext(stream)).text
        queued = submit(server, "a", **GREEDY)
        await until(lambda: server.stats.waiting == 1)
        await queued.aclose()
        await until(lambda: server.stats.waiting == 0)
        assert await pieces_of(queued) == []

        running[0].abort()  # in decode
        last = (await pieces_of(running[0]))[-1]
        assert last.finish_reason == "abort" and running[0].finished
        prefilling = submit(server, [C] * 1500, **GREEDY, max_tokens=5)  # 32 steps of prompt
        await until(lambda: server.stats.running == 4)
        await prefilling.aclose()
        done = submit(server, "a", **GREEDY)
        for stream in running[1:]:
            await stream.aclose()
        assert await text_of(done) == TEXT
        done.abort()
        await done.aclose()

    run(scenario())


def test_a_cancelled_reader_aborts(server: AsyncEngine, run) -> None:
    async def scenario() -> None:
        readers = [asyncio.create_task(text_of(submit(server, "c", **ENDLESS))) for _ in range(2)]
        readers.append(asyncio.create_task(submit(server, "c", **ENDLESS).output()))
        await until(lambda: server.stats.running == 3)
        for reader in readers:
            reader.cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await until(lambda: idle(server), 5)

    run(scenario())


def test_the_queue_has_an_end(server: AsyncEngine, run) -> None:
    async def scenario() -> None:
        streams = [submit(server, "c", **ENDLESS) for _ in range(4 + QUEUED)]
        for _ in range(2):
            with pytest.raises(
                QueueFullError, match=rf"3 requests wait already, .*\(max_num_queued_reqs\) is {QUEUED}"
            ):
                submit(server, "a")
        await until(lambda: server.stats.waiting == QUEUED)
        with pytest.raises(QueueFullError):
            submit(server, "a")
        streams.pop().abort()
        late = submit(server, "a", **GREEDY)
        for stream in streams:
            stream.abort()
        assert await text_of(late) == TEXT

    run(scenario())


def test_hundreds_of_aborts_at_once(server: AsyncEngine, run, monkeypatch) -> None:
    monkeypatch.setattr(server, "_max_queued", None)

    async def scenario() -> None:
        streams = [submit(server, "c", **ENDLESS, n=1 + i % 3) for i in range(300)]
        await anext(streams[0])
        began = time.monotonic()
        for stream in streams:
            stream.abort()
        assert time.monotonic() - began < 2
        await until(lambda: idle(server), 10)
        assert await text_of(submit(server, "a", **GREEDY)) == TEXT

    run(scenario())


def test_a_slow_reader_and_a_blocked_loop(server: AsyncEngine, run) -> None:
    """A reader that takes nothing finds one piece; while the loop is blocked, the engine goes on by itself."""

    async def scenario() -> None:
        slow = submit(server, "c", **{**ENDLESS, "max_tokens": 400}, logprobs=1)
        fast = await submit(server, "c", **{**ENDLESS, "max_tokens": 400}).output()
        await until(lambda: slow.finished)
        pieces = await pieces_of(slow)
        assert len(pieces) == 1 and pieces[0].text == fast.outputs[0].text == "c" * 400
        assert len(pieces[0].logprobs or []) == 400

        blocked = submit(server, "c", **{**ENDLESS, "max_tokens": 1500})
        await anext(blocked)
        time.sleep(2)
        after = await anext(blocked)
        await asyncio.sleep(0.1)
        assert len(after.token_ids) > 20 or len((await anext(blocked)).token_ids) > 20
        blocked.abort()
        await pieces_of(blocked)

    run(scenario())


def test_resetting_the_prefix_cache(server: AsyncEngine, run) -> None:
    async def scenario() -> None:
        prompt = [C] * 64
        assert await server.reset_prefix_cache()
        first = submit(server, prompt, **GREEDY, max_tokens=1)
        await pieces_of(first)
        again = submit(server, prompt, **GREEDY, max_tokens=1)
        await anext(again)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
        running = submit(server, "c", **ENDLESS)
        await anext(running)
        assert not await server.reset_prefix_cache()
        await running.aclose()
        await until(lambda: idle(server))
        assert await server.reset_prefix_cache()
        assert (await submit(server, prompt, **GREEDY, max_tokens=1).output()).num_cached_tokens == 0

    run(scenario())


def test_what_the_observer_sees(server: AsyncEngine, run, recorder: Recorder, caplog) -> None:
    async def scenario() -> None:
        await until(lambda: idle(server))
        recorder.__init__()
        before = server.stats
        await submit(server, "a", **GREEDY, n=2).output()
        submit(server, "a", **GREEDY).abort()
        await until(lambda: idle(server))
        whole, aborted = recorder.finished
        assert whole.finish_reasons == ("stop", "stop") and aborted.finish_reasons == ("abort",)
        assert whole.num_generation_tokens == 12 and aborted.num_generation_tokens == 0
        assert whole.queue_time is not None and 0 <= whole.queue_time < whole.e2e_time
        assert whole.prefill_time is not None and whole.decode_time is not None and whole.prefill_time > 0
        assert aborted.queue_time is None
        assert len(recorder.first) == 1 and len(recorder.later) == 10 and min(recorder.later) >= 0
        after = recorder.stats[-1]
        assert after == server.stats and after.generation_tokens >= before.generation_tokens + 12
        recorder.broken = True
        assert await text_of(submit(server, "a", **GREEDY)) == TEXT
        recorder.broken = False
        assert any("the observer failed" in record.message for record in caplog.records)

    run(scenario())


def test_an_output_that_cannot_be_read_hurts_nobody_else(server: AsyncEngine, run, monkeypatch, caplog) -> None:
    async def scenario() -> None:
        bad, good = submit(server, "c", **ENDLESS), submit(server, "a", **GREEDY)

        def fail(event: object, now: float) -> None:
            raise ValueError("on purpose")

        monkeypatch.setattr(bad, "take", fail)
        with pytest.raises(Exception, match="the output of this request cannot be read"):
            await bad.output()
        assert await text_of(good) == TEXT

    run(scenario())


def test_two_requests_with_one_name(server: AsyncEngine, run) -> None:
    async def scenario() -> None:
        prompt = server.parse_prompt("a")
        streams = [server.submit(prompt, SamplingParams(**GREEDY), request_id="same") for _ in range(2)]
        assert streams[0].key != streams[1].key
        for pieces in await asyncio.gather(*map(pieces_of, streams)):
            assert "".join(piece.text for piece in pieces) == TEXT
            assert {piece.request_id for piece in pieces} == {"same"}

    run(scenario())


def test_draining(server: AsyncEngine, run) -> None:
    async def scenario() -> None:
        short = asyncio.create_task(text_of(submit(server, "a", **GREEDY)))
        await server.drain(30)
        assert await short == TEXT
        await server.drain(0)
        long = submit(server, "c", **ENDLESS)
        await server.drain(0.05)
        assert (await pieces_of(long))[-1].finish_reason == "abort"

    run(scenario())


def test_the_process_sleeps_when_idle_and_nothing_listens(server: AsyncEngine, run) -> None:
    assert server._connection.pid is not None
    child = psutil.Process(server._connection.pid)

    async def scenario() -> None:
        before = sum(child.cpu_times()[:2])
        await asyncio.sleep(1)
        assert sum(child.cpu_times()[:2]) - before < 0.1
        for process in (child, psutil.Process()):
            assert [c for c in process.net_connections("inet") if c.status == "LISTEN"] == []
            paths = [c.laddr for c in process.net_connections("unix") if c.laddr]
            assert not any(pathlib.Path(path).exists() for path in paths if "octavo-" in path)
        times = []
        for _ in range(50):
            began = time.perf_counter()
            await server.reset_prefix_cache()
            times.append(time.perf_counter() - began)
        assert sorted(times)[10] < 0.02  # under 1 ms on a machine with nothing else to do

    run(scenario())


def test_closing_leaves_nothing(model: pathlib.Path, recwarn: pytest.WarningsRecorder) -> None:
    """No process, thread, task, socket or folder; what was open gets an error."""
    this = psutil.Process()

    def traces() -> tuple[int, int, set[str]]:
        folders = {c.laddr for c in this.net_connections("unix") if "octavo-" in str(c.laddr)}
        return this.num_fds(), threading.active_count(), folders

    async def scenario() -> None:
        server = await AsyncEngine.start(EngineConfig(model=str(model), **OPTIONS), progress=False)
        child = psutil.Process(server._connection.pid)
        stream = submit(server, "c", **ENDLESS)
        await anext(stream)
        waiting = asyncio.create_task(server.wait_dead())
        began = time.monotonic()
        await server.close()
        assert time.monotonic() - began < 5 and not child.is_running()
        with pytest.raises(EngineDeadError, match="closed"):
            await pieces_of(stream)
        await waiting
        await server.close()
        for call in (server.check_health, lambda: submit(server, "a")):
            with pytest.raises(EngineDeadError, match="closed"):
                call()
        with pytest.raises(EngineDeadError, match="closed"):
            await server.reset_prefix_cache()
        assert server.num_unfinished == 0 and len(asyncio.all_tasks()) == 1

    before = traces()
    asyncio.run(scenario())
    assert traces() == before
