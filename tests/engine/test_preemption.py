"""What is preempted comes back, in its place, with the same tokens; nobody starves."""

import pytest

from tests.references.fake_engine import long, make, tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_is_identical(depth: int, caching: bool) -> None:
    """A pool so small that all but the first are preempted (B102)."""
    engine = make(blocks=12, rows=8, budget=16, depth=depth, enable_prefix_caching=caching)
    kinds = [{}, {"presence_penalty": 1.0}, {"seed": 5}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"min_tokens": 9}]
    for i in range(8):
        engine.add(f"r{i}", tokens(5, seed=i), **long(22, **kinds[i % len(kinds)]))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions >= 7


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_each_fill_most_of_the_pool(depth: int) -> None:
    """Only one holds blocks at a time, and each step makes progress (B100)."""
    engine = make(blocks=16, rows=7, budget=8, depth=depth)
    for i in range(6):
        engine.add(f"r{i}", tokens(38, seed=i), **long(10))
    engine.run(limit=6 * (5 + 10 + 3))
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions == 0


def test_the_last_to_come_is_preempted_and_keeps_its_place() -> None:
    engine = make(blocks=8, rows=3, budget=32, depth=1)
    engine.add("a", tokens(8), **long(20))
    engine.add("b", tokens(8, seed=1), **long(8))
    engine.add("c", tokens(6, seed=2), **long(8))
    engine.add("d", tokens(6, seed=3), **long(8))
    order = []
    for _ in range(80):
        plan = engine.step()
        if plan is None:
            break
        order += [load.token_ids[:6] for load in plan.loads]
    names = {tuple(request.prompt_token_ids[:6]): name for name, request in engine.requests.items()}
    starts = "".join(names[tuple(prefix)] for prefix in order)
    engine.check_outputs()
    assert starts.startswith("abc")
    assert "c" in starts[3:], "c is the last of three that do not fit"
    assert starts.index("d") > starts.rindex("c"), "what was preempted goes first"


def test_what_is_preempted_does_not_come_back_in_the_same_step() -> None:
    engine = make(blocks=8, rows=4, budget=32, depth=1)
    engine.add("a", tokens(12), **long(18))
    engine.add("b", tokens(16, seed=1), **long(8))
    engine.add("c", tokens(1, seed=2), **long(2))
    before = 0
    for _ in range(30):
        plan = engine.step()
        if plan is None:
            break
        if engine.scheduler.stats.num_preemptions > before:
            before = engine.scheduler.stats.num_preemptions
            assert plan.loads == []
    assert before > 0
    engine.run()
    engine.check_outputs()


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    engine = make(blocks=10, rows=2, budget=32, depth=2)
    engine.add("a", tokens(12), **long(16))
    engine.add("b", tokens(12, seed=1), **long(16))
    engine.run()
    engine.check_outputs()
    resumed = [load for plan in engine.device.launched for load in plan.loads if len(load.token_ids) > 12]
    assert resumed
    assert any(load.num_computed > 0 for load in resumed)
    assert engine.cached("b") == 0  # at its first start (B097)
    whole = tokens(12, seed=1) + engine.output("b")
    engine.add("again", [*whole[:24], 9], **long(2))
    engine.run()
    assert engine.cached("again") == 24  # what it computed after it was resumed, too


def test_without_caching_a_preempted_sequence_recomputes() -> None:
    engine = make(blocks=10, rows=2, budget=32, enable_prefix_caching=False)
    engine.add("a", tokens(12), **long(16))
    engine.add("b", tokens(12, seed=1), n=2, **long(16))
    engine.run()
    engine.check_outputs()
    resumed = [load for plan in engine.device.launched for load in plan.loads if len(load.token_ids) > 12]
    assert resumed
    assert all(load.num_computed == 0 for load in resumed)


def test_priority_runs_first_and_loses_last() -> None:
    engine = make(blocks=8, rows=2, budget=32, depth=1, policy="priority")
    engine.add("low", tokens(8), priority=5, **long(20))
    engine.step()
    engine.add("mid", tokens(8, seed=1), priority=1, **long(16))
    engine.add("high", tokens(8, seed=2), priority=-1, **long(8))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions > 0
    first_loads = [load.token_ids[:8] for plan in engine.device.launched for load in plan.loads]
    assert first_loads.index(tokens(8, seed=2)) < first_loads.index(tokens(8, seed=1))
    victims = [ids for ids in first_loads if first_loads.count(ids) > 1]
    assert tokens(8, seed=2) not in victims


def test_fcfs_ignores_priority() -> None:
    engine = make(rows=1)
    engine.add("a", tokens(4), priority=9, **long(3))
    engine.add("b", tokens(4, seed=1), priority=0, **long(3))
    assert engine.step().loads[0].token_ids == tokens(4)


def test_the_watermark_is_kept_free_while_others_run() -> None:
    engine = make(blocks=10, rows=4, budget=40, watermark=0.2)
    engine.add("a", tokens(16), **long(4))
    engine.add("b", tokens(20, seed=1), **long(4))  # 4 + 5 blocks leave 1, not 2
    assert len(engine.step().loads) == 1
    engine.run()
    engine.add("c", tokens(40, seed=2), **long(1))  # alone it may have all
    engine.run()
    engine.check_outputs()
