"""The engine's loop around a scheduler and a fake device, with every invariant checked after every operation."""

import collections

import numpy as np

from octavo.configs.scheduler import SchedulerConfig
from octavo.engine.buckets import Ladder
from octavo.engine.kv_groups import KVGroups
from octavo.engine.plan import Plan, SampledHost
from octavo.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from octavo.engine.scheduler import Scheduler
from tests.references.fake_device import VOCAB, FakeDevice, prompt_logprobs, solo

EOS = (7,)


def make_ladder(rows: int, budget: int) -> Ladder:
    programs = (
        (budget, rows, "prompt"),
        (rows, rows, "logprobs"),
        (1, 1, "plain"),
        (rows, rows, "plain"),
        (budget, rows, "full"),
        ((rows + budget + 1) // 2, rows, "plain"),
    )
    return Ladder(programs=programs, coarse=programs[:2], ready=frozenset(programs))


class FakeEngine:
    """Depth 1 commits each step before the next is planned, depth 2 runs one ahead, depth 3 two."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_sizes: list[int],
        rows: int,
        budget: int,
        depth: int = 2,
        **options: object,
    ) -> None:
        ladder = make_ladder(rows, budget)
        config = SchedulerConfig(
            **{
                "max_num_seqs": rows,
                "max_num_batched_tokens": budget,
                "max_model_len": 64,
                "vocab_size": VOCAB,
                "max_constrained_rows": rows,
                "max_logprobs": 3,
                "max_in_flight": depth,
                "watermark": 0.0,
                **options,
            }
        )
        self.depth = depth
        self.scheduler = Scheduler(config, ladder, KVGroups(num_blocks, block_sizes))
        self.device = FakeDevice(ladder, num_blocks, block_sizes, budget)
        self.in_flight: collections.deque[tuple[Plan, SampledHost]] = collections.deque()
        self.requests: dict[str, Request] = {}
        self.events: dict[tuple[str, int], list[TokenEvent]] = collections.defaultdict(list)
        self.num_steps = 0

    def add(
        self, name: str, prompt: list[int], *, priority: int = 0, salt: str | None = None, **params: object
    ) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(**{"seed": 0, **params}),
            eos_token_ids=EOS,
            arrival_time=float(len(self.requests)),
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.check(request)
        self.requests[name] = request
        self.scheduler.add(request)
        self.check()

    def abort(self, name: str) -> list[TokenEvent]:
        events = self.scheduler.abort(name)
        self._take(events)
        self.check()
        return events

    def step(self) -> Plan | None:
        """One turn of the loop, as EngineCore makes it."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append((plan, self.device.launch(plan)))
            self.scheduler.dispatched(plan)
            running = {seq.seq_id for seq in self.scheduler._running}
            assert running.issuperset(plan.seq_ids), "who has a row must not be preempted in the same plan"
            self._check_tables()
            self.num_steps += 1
        self.check()
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.commit()
        elif plan is None:
            assert not self.scheduler.has_unfinished, "nothing can run and nothing is in flight"
        return plan

    def commit(self) -> None:
        plan, sampled = self.in_flight.popleft()
        self._take(self.scheduler.commit(plan, sampled))
        self.check()

    def run(self, limit: int = 2000) -> None:
        """Until everything is finished; `limit` steps must do."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "no end in sight"
        pools = self.scheduler._groups.pools
        assert all(pool.num_free == pool.num_usable for pool in pools), "a finished request holds blocks"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def output(self, name: str, index: int = 0) -> list[int]:
        return [token for event in self.events[name, index] for token in event.token_ids]

    def finish(self, name: str, index: int = 0) -> FinishReason | None:
        return self.events[name, index][-1].finish_reason

    def cached(self, name: str, index: int = 0) -> int:
        return self.events[name, index][-1].num_cached_tokens

    def check_outputs(self) -> None:
        """Every sequence gave what it gives alone (a beginning of it, if aborted), with all log-probabilities."""
        for name, request in self.requests.items():
            for index in range(request.params.n):
                self._check_output(request, name, index)

    def _check_output(self, request: Request, name: str, index: int) -> None:
        params, prompt = request.params, request.prompt_token_ids
        expected, got = solo(prompt, params, (params.seed + index) % 2**32, EOS), self.output(name, index)
        events = self.events[name, index]
        assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
        reason = events[-1].finish_reason
        assert reason is not None
        if reason is FinishReason.ABORT:
            assert got == expected[: len(got)]
        elif reason is not FinishReason.ERROR:
            assert got == expected, (name, index)
            stops = {*(() if params.ignore_eos else EOS), *(params.stop_token_ids or ())}
            stopped = bool(got) and got[-1] in stops and len(got) > params.min_tokens
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if params.logprobs is not None:
            entries = [entry for event in events for entry in event.logprobs or []]
            assert [entry.token_id for entry in entries] == got
            assert all(len(entry.top_ids) == params.logprobs for entry in entries)
        with_prompt = [i for i, event in enumerate(events) if event.prompt_logprobs is not None]
        if params.prompt_logprobs is None or index > 0:
            assert with_prompt == []
        elif reason is not FinishReason.ABORT or got:
            assert with_prompt == [0]
            first, *others = events[0].prompt_logprobs
            assert first is None
            assert [(e.token_id, e.logprob) for e in others] == list(
                zip(prompt[1:], prompt_logprobs(prompt), strict=True)
            )

    def check(self) -> None:
        self.scheduler.check_invariants()

    def _check_tables(self) -> None:
        """What loads and edits made of the device's tables is what the host believes."""
        for seq in self.scheduler._running:
            slot = self.device.slots[seq.slot]
            assert slot.tables == seq.block_ids
            assert slot.num_computed == seq.num_computed
            assert slot.load.constrained_row == seq.constrained_row

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert not self.events[key] or self.events[key][-1].finish_reason is None, "an event after the last"
            self.events[key].append(event)


BLOCK = 4


def make(
    blocks: int = 64, rows: int = 4, budget: int = 32, *, block_sizes: list[int] | None = None, **options: object
) -> FakeEngine:
    sizes = block_sizes or [BLOCK]
    return FakeEngine(num_blocks=[blocks + 1] * len(sizes), block_sizes=sizes, rows=rows, budget=budget, **options)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, VOCAB, n).tolist()  # no EOS among them


def long(max_tokens: int = 8, **params: object) -> dict:
    return {"max_tokens": max_tokens, "ignore_eos": True, **params}
