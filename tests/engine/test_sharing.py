"""Blocks that several sequences use: the prefix cache and the siblings of n > 1."""

import pytest

from tests.references.fake_engine import long, make, tokens

# n > 1.


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_share_the_prompt(caching: bool, depth: int) -> None:
    engine = make(budget=8, depth=depth, enable_prefix_caching=caching)
    engine.add("a", tokens(18), n=3, **long())
    engine.add("b", tokens(18), **long())
    engine.run()
    engine.check_outputs()
    assert [engine.cached("a", i) for i in range(3)] == [0, 16, 16]
    assert engine.cached("b") <= (16 if caching else 0)
    computed = sum(sum(plan.q_lens) for plan in engine.device.launched)
    assert computed <= 18 + 2 * 2 + 18 + 4 * 7
    assert engine.scheduler.stats.prompt_tokens == 4 * 18


def test_private_blocks_of_siblings_are_nobody_elses() -> None:
    engine = make(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, tokens(18), n=2, **long(2))
        engine.run()
    engine.add("c", tokens(18), **long(2))
    engine.run()
    engine.check_outputs()
    assert [engine.cached("b", 0), engine.cached("b", 1), engine.cached("c")] == [0, 16, 0]


def test_siblings_carry_on_when_the_first_one_fails() -> None:
    engine = make(budget=8, depth=1)
    engine.device.broken_tokens = {3}
    engine.add("a", [*tokens(18), 3], n=3, **long())
    for _ in range(3):
        engine.step()
    engine.device.broken_tokens = set()
    engine.run()
    assert [engine.finish("a", i) for i in range(3)] == ["error", "length", "length"]
    engine.check_outputs()


def test_more_samples_than_rows() -> None:
    engine = make(rows=2, blocks=20)
    engine.add("a", tokens(9), n=11, max_tokens=5)
    engine.add("b", tokens(9, seed=1), **long())
    engine.run()
    engine.check_outputs()
    assert len({tuple(engine.output("a", i)) for i in range(11)}) > 1


# The prefix cache.


def test_salts_and_their_absence_are_apart() -> None:
    engine = make()
    for name, salt in (("plain", None), ("x", "X"), ("y", "Y"), ("x2", "X"), ("empty", ""), ("odd", "\x00\ud800😀")):
        engine.add(name, tokens(18), salt=salt, **long(2))
        engine.run()
    assert [engine.cached(name) for name in ("plain", "x", "y", "x2", "empty", "odd")] == [0, 0, 0, 16, 0, 0]
    engine.check_outputs()


def test_prompt_logprobs_skip_hits_and_leave_blocks_behind() -> None:
    engine = make(budget=8)
    engine.add("a", tokens(18), **long(4))
    engine.run()
    engine.add("b", tokens(18), n=2, **long(4, prompt_logprobs=2))
    engine.run()
    engine.check_outputs()
    assert [engine.cached("b", i) for i in range(2)] == [0, 16]


def test_equal_prompts_of_one_step_do_not_share() -> None:
    engine = make(budget=64)
    engine.add("a", tokens(17), **long())
    engine.add("b", tokens(17), **long())
    assert engine.step().q_lens == [17, 17]
    engine.run()
    engine.check_outputs()


def test_a_block_is_found_in_the_step_after_the_one_that_fills_it() -> None:
    engine = make(budget=16, depth=3)
    engine.add("a", tokens(30), **long())
    engine.step()
    engine.add("b", tokens(30), **long())
    plan = engine.step()  # a's first chunk is in flight, not committed
    assert (plan.q_lens, plan.loads[0].num_computed) == ([14, 2], 16)
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_output_block_is_not_found_before_its_last_token_is_computed(depth: int) -> None:
    """A conversation goes on while its first answer still runs, at each length."""
    for steps in range(1, 12):
        engine = make(depth=depth)
        engine.add("a", tokens(5), **long(20))
        for _ in range(steps):
            engine.step()
        engine.add("b", tokens(5) + engine.output("a") + [9, 9], **long(4))
        engine.run()
        engine.check_outputs()


def test_reset_only_while_nothing_runs() -> None:
    engine = make()
    engine.add("a", tokens(18), **long(3))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.check()
    engine.add("b", tokens(18), **long(3))
    engine.run()
    engine.check_outputs()
    assert engine.cached("b") == 0
    assert engine.scheduler.stats.prefix_queries == 36


def test_groups_of_different_block_sizes_serve_what_both_have() -> None:
    engine = make(block_sizes=[4, 8])
    engine.add("a", tokens(23), **long(3))
    engine.run()
    engine.add("b", tokens(23), **long(3))
    engine.add("c", tokens(15), **long(3))
    engine.run()
    engine.check_outputs()
    assert (engine.cached("b"), engine.cached("c")) == (16, 8)
