"""The block pool against a naive one, and the order in which it reuses blocks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.configs.errors import ConfigError
from octavo.engine.block_pool import BlockPool


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="no free block"):
        pool.take()
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(1)


def test_reuse_takes_unkeyed_blocks_first_then_tails_before_heads() -> None:
    pool = BlockPool(9)
    old, new = [pool.take() for _ in range(3)], [pool.take() for _ in range(3)]
    for blocks, name in ((old, "old"), (new, "new")):
        for i, block in enumerate(blocks[:2]):
            pool.offer(block, f"{name}{i}".encode())
    pool.release(old)
    pool.release(new)
    fresh = {7, 8}
    order = [pool.take() for _ in range(8)]
    assert set(order[:4]) == fresh | {old[2], new[2]}
    assert order[4:] == [old[1], old[0], new[1], new[0]]
    pool.check(dict.fromkeys(order, 1))


def test_a_held_block_is_never_reused_and_a_freed_one_is_found_until_it_is() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.offer(block, b"key")
    pool.share(block)
    pool.release([block])
    assert pool.take() != block  # one reference is left (B095)
    pool.release([block])
    assert pool.find(b"key") == block
    pool.share(pool.find(b"key"))
    pool.release([block])
    assert pool.take() == block
    assert pool.find(b"key") == 0


def test_the_first_of_two_equal_blocks_is_the_one_found() -> None:
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    pool.offer(first, b"key")
    pool.offer(second, b"key")
    assert pool.find(b"key") == first
    pool.forget(first)
    assert pool.find(b"key") == 0
    pool.check({first: 1, second: 1})


def test_releasing_too_often_is_refused() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.release([block])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([block])


def test_check_finds_damage() -> None:
    pool = BlockPool(6)
    block = pool.take()
    pool.check({block: 1})
    with pytest.raises(RuntimeError, match="references"):
        pool.check({block: 2})
    pool.num_free -= 1
    with pytest.raises(RuntimeError, match="counted"):
        pool.check()
    pool.num_free += 1
    pool._key[block] = b"lost"
    with pytest.raises(RuntimeError, match="agree"):
        pool.check()
    pool._key[block] = None
    pool._refs[2] = 1
    with pytest.raises(RuntimeError, match="free with"):
        pool.check()


@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(2, 12))
@settings(max_examples=100)
def test_random_operations(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks)
    holders: list[list[int]] = []
    findable: dict[bytes, int] = {}  # naive: what must be found, forgotten when taken again
    for _ in range(150):
        match rng.choice(["take", "take", "release", "offer", "share", "forget", "find"]):
            case "take":
                count = rng.randint(1, 3)
                if count <= pool.num_free:
                    blocks = [pool.take() for _ in range(count)]
                    held = {block for holder in holders for block in holder}
                    assert not held & set(blocks)
                    holders.append(blocks)
                    findable = {key: block for key, block in findable.items() if block not in blocks}
            case "release" if holders:
                pool.release(holders.pop(rng.randrange(len(holders))))
            case "offer" if holders:
                key, block = bytes([rng.randrange(6)]), rng.choice(rng.choice(holders))
                pool.offer(block, key)
                if key not in findable and block not in findable.values():
                    findable[key] = block
            case "share" if findable:
                block = pool.find(rng.choice(list(findable)))
                holders.append([block])
                pool.share(block)
            case "forget" if findable:
                key = rng.choice(list(findable))
                pool.forget(findable.pop(key))
        refs: dict[int, int] = {}
        for holder in holders:
            for block in holder:
                refs[block] = refs.get(block, 0) + 1
        pool.check(refs)
        assert {key: pool.find(key) for key in findable} == findable
    for holder in holders:
        pool.release(holder)
    pool.forget_all()
    pool.check({})
    assert pool.num_free == pool.num_usable
