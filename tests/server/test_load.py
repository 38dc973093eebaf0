"""Bar 1: mixed streams, and clients that go away at every stage. Who stays gets what he gets alone; nothing is left.

The model is a small random one, whose output depends on all of its cache, in a pool that is too small for all rows.
"""

import asyncio
import json
import pathlib
import random
import signal
import string
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.references.http_streams import STAGES, Answer, Choice, ask, leave
from tests.references.servers import Server
from tests.references.tiny_models import BY_NAME, write_checkpoint

STREAMS, LEAVING, KINDS = 64, 16, 24
TOLERANCE = 1e-4  # of log-probabilities, as tests/references/engine_runs.py says
OPTIONS = {"max-model-len": 512, "num-gpu-blocks-override": 64}
MEMORY = 48 << 20  # bytes that a process may grow by: allocators keep some


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the server writes its counts."""
    return tmp_path_factory.mktemp("counts") / "counts.json"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, repository: pathlib.Path, counts: pathlib.Path) -> Iterator[Server]:
    """A server of a random model that says what lives in it."""
    folder = tmp_path_factory.mktemp("random")
    write_checkpoint(BY_NAME["llama-gqa"], folder / "model")
    with Server(
        folder / "model",
        folder / "log",
        ["--enable-reset-prefix-cache", "--disable-uvicorn-access-log"],
        options=OPTIONS,
        environment={"OCTAVO_TEST_COUNTS": str(counts), "PYTHONPATH": str(repository)},
        module="tests.references.instrumented_server",
    ) as server:
        yield server.wait_until_ready()
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log


def mixed(kind: int, max_tokens: int | None = None) -> tuple[str, dict[str, Any]]:
    """A path and a body: chats and completions, short and long, greedy and seeded, with all that can be asked for."""
    rng = random.Random(kind)
    text = "".join(rng.choices(string.ascii_letters + " ", k=rng.choice((3, 15, 16, 40, 150, 260))))
    body: dict[str, Any] = {"stream": True, "seed": kind, "return_token_ids": True, "ignore_eos": True}
    body["max_tokens"] = max_tokens or rng.randrange(40, 150)
    body["temperature"] = rng.choice((0, 0, 0.7, 1.2))
    chat = kind % 2 == 0
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if kind % 3 == 0:
        body["n"] = 2 + kind % 2
    if kind % 4 == 1:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if kind % 5 == 2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    if kind % 5 == 3:
        body |= {"stop": ["e", "qu", "\u00e9"], "ignore_eos": False}
    if kind % 7 == 4:
        body |= {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "logit_bias": {"70": 2}}
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


def same(got: Choice, alone: Choice) -> bool:
    """The same text and tokens, unless the two likeliest were closer than the tolerance."""
    for position, (mine, other) in enumerate(zip(got.token_ids, alone.token_ids, strict=False)):
        if mine != other:
            return position < len(alone.gaps) and alone.gaps[position] < TOLERANCE
    close = all(abs(a - b) < TOLERANCE for a, b in zip(got.logprobs, alone.logprobs, strict=True))
    ends = (got.text, got.token_ids, got.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
    return close and ends


async def alone_and_together(port: int) -> tuple[dict[int, Answer], dict[int, list[Answer]]]:
    """Each kind of request by itself, and then all at once, those that leave among them."""
    alone = {kind: await ask(port, *mixed(kind)) for kind in range(KINDS)}
    assert (await ask(port, "/reset_prefix_cache", {})).status == 200
    rng = random.Random(5)
    leaving = [leave(port, *mixed(rng.randrange(KINDS), 200), STAGES[i % 4], rng) for i in range(LEAVING)]
    staying = [(i % KINDS, ask(port, *mixed(i % KINDS))) for i in range(STREAMS - LEAVING)]
    order = [*leaving, *(stream for _, stream in staying)]
    rng.shuffle(order)
    tasks = {}
    for number, stream in enumerate(order):
        tasks[stream] = asyncio.ensure_future(stream)
        if number % 8 == 7:
            await asyncio.sleep(0.02)
    together: dict[int, list[Answer]] = {kind: [] for kind in range(KINDS)}
    for kind, stream in staying:
        together[kind].append(await tasks[stream])
    await asyncio.gather(*tasks.values())
    return alone, together


def test_who_stays_gets_what_he_gets_alone(busy: Server) -> None:
    """B024: 64 streams, 16 of which are left, in a pool that makes the engine preempt."""
    busy.wait_until_idle()
    before = preemptions(busy)
    alone, together = asyncio.run(alone_and_together(busy.port))
    busy.wait_until_idle(2.0)
    assert preemptions(busy) > before
    for kind, answers in together.items():
        expected = alone[kind]
        assert expected.status == 200 and expected.done and expected.error is None, (kind, expected.body)
        assert len(expected.choices) == mixed(kind)[1].get("n", 1)
        for answer in answers:
            assert answer.status == 200 and answer.done and answer.error is None, (kind, answer.body)
            assert answer.choices.keys() == expected.choices.keys()
            for index, choice in answer.choices.items():
                assert same(choice, expected.choices[index]), (kind, index, choice, expected.choices[index])
    assert sum(len(answers) for answers in together.values()) == STREAMS - LEAVING


async def many(port: int, number: int, seed: int) -> None:
    """Short requests, 32 at once; one in eight goes away."""
    rng, places = random.Random(seed), asyncio.Semaphore(32)

    async def one(i: int) -> None:
        async with places:
            path, body = mixed(rng.randrange(KINDS), 2)
            body["stream"] = i % 3 > 0
            if i % 8 == 0:
                await leave(port, path, body, STAGES[i // 8 % 4], rng)
            else:
                answer = await ask(port, path, body)
                assert answer.status == 200, answer.body

    await asyncio.gather(*map(one, range(number)))


def test_nothing_is_left(busy: Server, counts: pathlib.Path) -> None:
    """After 2,000 requests: sockets, threads, tasks, requests, blocks and memory, of both processes."""
    asyncio.run(many(busy.port, 100, seed=1))  # threads and pools that stay are made by the first ones
    before, memory = left(busy, counts)
    asyncio.run(many(busy.port, 2000, seed=2))
    after, grown = left(busy, counts)
    assert after == before
    assert all(b - a < MEMORY for a, b in zip(memory, grown, strict=True)), (memory, grown)


def left(server: Server, counts: pathlib.Path) -> tuple[dict[str, int], list[int]]:
    """What there is when nothing runs: counts by name, and bytes of both processes."""
    server.wait_until_idle()
    time.sleep(1.2)  # a refused connection is kept for a second
    processes = [psutil.Process(server.process.pid), server.engine]
    counts.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + 20
    while not counts.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    found = json.loads(counts.read_text())
    for name, process in zip(("server", "engine"), processes, strict=True):
        found |= {f"{name} files": process.num_fds(), f"{name} threads": process.num_threads()}
    return found, [process.memory_info().rss for process in processes]


def preemptions(server: Server) -> float:
    return next(value for name, value in server.metrics().items() if name.startswith("octavo:num_preemptions_total"))
