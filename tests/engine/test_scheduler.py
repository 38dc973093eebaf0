"""The scheduler's promises, one by one, on a fake device whose tokens depend on every KV entry."""

import dataclasses

import msgspec
import numpy as np
import pytest

from octavo.engine.errors import RequestError
from octavo.engine.request import FinishReason, SamplingParams
from tests.references.fake_device import VOCAB, solo
from tests.references.fake_engine import BLOCK, EOS, long, make, tokens

# Lengths, chunks, stops.


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("depth", [1, 2])
def test_lengths_around_blocks_and_chunks(length: int, depth: int) -> None:
    engine = make(budget=8, depth=depth)
    engine.add("a", tokens(length), **long())
    engine.add("b", tokens(length), **long())  # the same prompt, cached as far as it got
    engine.run()
    engine.add("c", tokens(length), **long())
    engine.run()
    engine.check_outputs()
    assert engine.cached("c") == (length - 1) // BLOCK * BLOCK  # at least one token is computed (B091)


def test_decode_rows_come_first_and_a_prompt_takes_what_is_left() -> None:
    engine = make(budget=8, depth=1)
    engine.add("a", tokens(4), **long(30))
    engine.step()
    engine.add("b", tokens(30, seed=1), **long())
    plan = engine.step()
    assert (plan.num_decode, plan.q_lens, plan.samples) == (1, [1, 7], [1, 0])
    while sum(plan.q_lens) == 8:
        plan = engine.step()
    assert (plan.num_decode, plan.q_lens, plan.samples) == (1, [1, 2], [1, 1])  # 30 = 4 × 7 + 2
    assert engine.step().q_lens == [1, 1]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    engine = make(budget=24, enable_chunked_prefill=False, depth=1)
    engine.add("a", tokens(20), **long())
    engine.add("b", tokens(20, seed=1), **long())
    assert engine.step().q_lens == [20]
    assert engine.step().q_lens == [1, 20]
    engine.run()
    engine.check_outputs()


def test_the_budget_shrinks_to_what_is_compiled() -> None:
    engine = make(budget=32, depth=1)
    ladder = engine.scheduler._ladder
    ladder.ready = frozenset({(4, 4, "prompt"), (10, 4, "prompt")})
    engine.add("a", tokens(25), **long())
    assert engine.step().program == (10, 4, "prompt")
    ladder.ready |= {(32, 4, "plain")}
    plan = engine.step()
    assert (plan.program, plan.q_lens) == ((32, 4, "plain"), [15])
    engine.run()
    engine.check_outputs()


def test_a_coarse_variant_shrinks_only_the_steps_that_need_it() -> None:
    engine = make(budget=32, depth=1)
    engine.scheduler._ladder.ready = frozenset({(4, 4, "prompt"), (8, 4, "prompt"), (32, 4, "plain")})
    engine.add("a", tokens(40), **long(prompt_logprobs=1))
    engine.add("b", tokens(40, seed=1), **long())
    engine.run()
    engine.check_outputs()
    assert max(sum(p.q_lens) for p in engine.device.launched if p.program[2] == "prompt") == 8
    assert max(sum(p.q_lens) for p in engine.device.launched) > 8


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_planned_past_the_end(depth: int) -> None:
    engine = make(depth=depth)
    engine.add("a", tokens(5), **long(7))
    engine.add("b", tokens(62, seed=1), **long(2))  # up to max_model_len
    engine.run()
    engine.check_outputs()
    sampled = sum(plan.samples[plan.seq_ids.index(0)] for plan in engine.device.launched if 0 in plan.seq_ids)
    assert sampled == 7


def test_eos_ends_and_drops_the_step_in_flight() -> None:
    answers = ((tokens(6, seed=s), solo(tokens(6, seed=s), SamplingParams(max_tokens=9), 0)) for s in range(200))
    prompt = next(prompt for prompt, answer in answers if EOS[0] in answer[2:-1])
    engine = make()
    engine.add("a", prompt, max_tokens=9)
    engine.run()
    engine.check_outputs()
    assert engine.output("a")[-1] == EOS[0]
    assert engine.finish("a") is FinishReason.STOP
    assert engine.events["a", 0][-1].stop_reason is None  # it is the model's own
    engine.add("b", prompt, max_tokens=9, ignore_eos=True)
    engine.add("c", prompt, max_tokens=9, ignore_eos=True, stop_token_ids=[7])  # B006
    engine.run()
    engine.check_outputs()
    assert len(engine.output("b")) == 9
    assert engine.output("c") == engine.output("a")
    assert engine.events["c", 0][-1].stop_reason == 7


def test_min_tokens_equal_to_max_tokens() -> None:
    engine = make()
    engine.add("a", tokens(5), max_tokens=6, min_tokens=6, stop_token_ids=list(range(8, 60)))
    engine.run()
    engine.check_outputs()
    assert len(engine.output("a")) == 6
    assert engine.finish("a") is FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 2, 20, 64])
def test_no_output_computes_the_prompt_only(length: int) -> None:
    engine = make(budget=8)
    engine.add("a", tokens(length), max_tokens=0, prompt_logprobs=2)
    engine.add("b", tokens(length), max_tokens=0)
    engine.run()
    engine.check_outputs()
    for name in "ab":
        (event,) = engine.events[name, 0]
        assert (event.token_ids, event.finish_reason) == ([], FinishReason.LENGTH)
    assert not any(any(plan.samples) for plan in engine.device.launched)


def test_accepted_drafts_are_taken_up_to_the_stop() -> None:
    """A step that verified drafts gives several tokens; those behind a stop are dropped (B110)."""
    engine = make(depth=1)
    engine.add("a", tokens(5), max_tokens=20, stop_token_ids=[30], logprobs=1)
    plan = engine.scheduler.plan()
    sampled = engine.device.launch(plan)
    engine.scheduler.dispatched(plan)
    rows = plan.program[1]
    several = dataclasses.replace(
        sampled,
        tokens=np.tile(np.array([[20, 30, 21]], np.int32), (rows, 1)),
        num_accepted=np.full(rows, 3, np.int32),
        logprobs=np.zeros((rows, 3), np.float32),
        ranks=np.ones((rows, 3), np.int32),
        top_ids=np.zeros((rows, 3, 3), np.int32),
        top_logprobs=np.zeros((rows, 3, 3), np.float32),
    )
    (event,) = engine.scheduler.commit(plan, several)
    assert (event.token_ids, event.finish_reason, event.stop_reason) == ([20, 30], FinishReason.STOP, 30)
    assert [entry.token_id for entry in event.logprobs] == [20, 30]


def test_a_stop_token_below_min_tokens_does_not_end() -> None:
    """The device masks them; should one come nevertheless, it is output like any other."""
    engine = make(depth=1)
    engine.add("a", tokens(5), max_tokens=20, min_tokens=2, stop_token_ids=[30])
    plan = engine.scheduler.plan()
    sampled = engine.device.launch(plan)
    engine.scheduler.dispatched(plan)
    rows = plan.program[1]
    stops = dataclasses.replace(
        sampled,
        tokens=np.full((rows, 4), 30, np.int32),
        num_accepted=np.full(rows, 4, np.int32),
        logprobs=np.zeros((rows, 4), np.float32),
    )
    (event,) = engine.scheduler.commit(plan, stops)
    assert (event.token_ids, event.finish_reason) == ([30, 30, 30], FinishReason.STOP)


# Variants.


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ({}, "plain"),
        ({"temperature": 0.0, "top_k": 5}, "plain"),  # greedy: the tail does not matter
        ({"top_k": 5}, "full"),
        ({"top_p": 0.5}, "full"),
        ({"min_p": 0.1}, "full"),
        ({"min_tokens": 1}, "full"),
        ({"logit_bias": {3: 1.0}}, "full"),
        ({"presence_penalty": 1.0, "temperature": 0.0}, "full"),
        ({"allowed_token_ids": [9]}, "full"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt"),
    ],
)
def test_the_variant_is_what_the_rows_need(params: dict, variant: str) -> None:
    engine = make(rows=3)
    programs = frozenset((t, 3, v) for t in (3, 32) for v in ("plain", "full", "logprobs", "prompt"))
    engine.scheduler._ladder.ready = programs
    engine.add("a", tokens(5), **long(3, **params))
    assert engine.step().program[2] == variant
    assert engine.step().program[2] == ("plain" if variant == "prompt" else variant)


def test_a_chunk_that_does_not_sample_needs_no_sampler() -> None:
    engine = make(budget=8)
    engine.scheduler._ladder.ready = frozenset((t, 4, v) for t in (4, 8) for v in ("plain", "full", "logprobs"))
    engine.add("a", tokens(20), **long(3, logprobs=1))
    assert [engine.step().program[2] for _ in range(3)] == ["plain", "plain", "logprobs"]


def test_slot_params() -> None:
    engine = make()
    engine.add(
        "a", tokens(5), n=2, max_tokens=9, min_tokens=2, seed=2**32 + 5, top_k=VOCAB, stop_token_ids=[3, 3],
        logit_bias={4: -1},
    )  # fmt: skip
    first, second = engine.step().loads + engine.step().loads
    assert (first.params.seed, second.params.seed) == (5, 6)
    assert first.params.top_k == 0
    assert first.params.stop_ids == [3, 7]
    assert first.params.min_length == 7
    assert first.params.logit_bias == {4: -1}
    assert first.params.allowed_token_ids is None


def test_unseeded_samples_draw_seeds_from_the_engine_and_keep_them() -> None:
    seeds = []
    for _ in range(2):
        engine = make(blocks=9, seed=3)
        for name in "abc":
            engine.add(name, tokens(8), seed=None, **long(12))
        for _ in range(60):
            engine.step()
        assert engine.scheduler.stats.num_preemptions > 0
        by_seq: dict[int, set[int]] = {}
        for plan in engine.device.launched:
            for load in plan.loads:
                by_seq.setdefault(plan.seq_ids[plan.slots.index(load.slot)], set()).add(load.params.seed)
        assert all(len(drawn) == 1 for drawn in by_seq.values())
        seeds.append(by_seq)
    assert seeds[0] == seeds[1]
    assert len(set.union(*seeds[0].values())) == 3


# Constrained rows.


def test_a_full_constrained_pool_makes_the_line_wait() -> None:
    engine = make(max_constrained_rows=1, depth=1)
    engine.add("a", tokens(4), **long(6, presence_penalty=1.0))
    engine.add("b", tokens(4, seed=1), **long(6, repetition_penalty=1.1))
    engine.add("c", tokens(4, seed=2), **long(6))
    assert [load.constrained_row for load in engine.step().loads] == [0]
    for _ in range(4):
        assert engine.step().loads == []  # nobody overtakes
    engine.step()
    plan = engine.step()
    assert [load.constrained_row for load in plan.loads] == [0, -1]
    engine.run()
    engine.check_outputs()


def test_without_constrained_rows_such_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="max_constrained_rows"):
        make(max_constrained_rows=0).add("a", [1], frequency_penalty=1.0)


# Aborts and errors.


def test_abort_at_every_stage() -> None:
    engine = make(rows=1, budget=8)
    assert engine.abort("nobody") == []
    engine.add("a", tokens(20), n=2, **long())
    engine.add("b", tokens(20, seed=1), **long())
    assert [event.index for event in engine.abort("b")] == [0]  # before its first schedule (B026)
    assert engine.abort("b") == []
    engine.step()
    assert [(e.index, e.finish_reason) for e in engine.abort("a")] == [(0, "abort"), (1, "abort")]  # between chunks
    engine.add("c", tokens(20, seed=2), **long())
    engine.run()
    assert engine.abort("c") == []  # after the end
    engine.check_outputs()


def test_cancelled_blocks_go_to_others_while_their_step_is_in_flight() -> None:
    """B024: five of twenty are cancelled in mid-decode and five come, with the pool nearly full."""
    engine = make(blocks=60, rows=20, budget=40, depth=3)
    for i in range(20):
        engine.add(f"r{i}", tokens(6, seed=i), **long(6))
    for _ in range(6):
        engine.step()
    for i in range(0, 20, 4):
        engine.abort(f"r{i}")
    for i in range(20, 25):
        engine.add(f"r{i}", tokens(6, seed=i), **long(12))
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_value_that_is_not_finite_ends_one_request_and_its_blocks(depth: int) -> None:
    engine = make(depth=depth)
    bad = [*tokens(16), 3]
    engine.device.broken_tokens = {3}
    engine.add("bad", bad, **long())
    engine.add("good", tokens(16, seed=1), **long())
    engine.run()
    (event,) = engine.events["bad", 0]
    assert event.finish_reason is FinishReason.ERROR
    assert "finite" in event.error
    engine.device.broken_tokens = set()
    engine.add("again", bad, **long())
    engine.add("other", [*tokens(16, seed=1), 9], **long())
    engine.run()
    engine.check_outputs()
    assert engine.cached("again") == 0
    assert engine.cached("other") == 16  # nobody else lost anything


def test_nan_prompt_logprobs_are_an_error() -> None:
    engine = make()
    engine.add("a", tokens(9), max_tokens=0, prompt_logprobs=1)
    plan = engine.scheduler.plan()
    sampled = engine.device.launch(plan)
    engine.scheduler.dispatched(plan)
    sampled.prompt_logprobs.logprob[3] = np.nan
    (event,) = engine.scheduler.commit(plan, sampled)
    assert event.finish_reason is FinishReason.ERROR
    assert not engine.scheduler.has_unfinished


# The loop's contract.


def test_plans_are_in_order_and_bounded() -> None:
    engine = make(depth=1)
    engine.add("a", tokens(5), **long())
    plan = engine.scheduler.plan()
    with pytest.raises(RuntimeError, match="in flight"):
        engine.scheduler.plan()
    with pytest.raises(RuntimeError, match="dispatched"):
        engine.scheduler.dispatched(msgspec.structs.replace(plan, step=7))


def test_a_recorded_plan_does_not_change_afterwards() -> None:
    engine = make(blocks=10, rows=3)
    for i in range(4):
        engine.add(f"r{i}", tokens(6, seed=i), **long(12))
    recorded = []
    while engine.scheduler.has_unfinished:
        plan = engine.step()
        if plan is not None:
            recorded.append((plan, msgspec.msgpack.encode(plan)))
    assert all(msgspec.msgpack.encode(plan) == encoded for plan, encoded in recorded)
    decoded = msgspec.msgpack.decode(recorded[0][1], type=type(recorded[0][0]))
    assert decoded.loads[0].token_ids == tokens(6)


def test_fcfs_starves_nobody() -> None:
    engine = make(blocks=16, rows=3, budget=12)
    engine.add("big", tokens(40), **long(20))
    for i in range(100):
        engine.add(f"s{i}", tokens(3, seed=i), **long(3))
        engine.step()
    assert engine.finish("big") is FinishReason.LENGTH
    engine.run()
    engine.check_outputs()
