"""KVGroups: what a sequence needs of every KV group at once, all or nothing.

Layers with equal cache specs form a group with a pool and a block size of its
own. The scheduler speaks to this coordinator only, in tokens and sequences.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.configs.errors import ConfigError
from octavo.engine.block_pool import BlockPool
from octavo.engine.prefix_cache import extend_keys
from octavo.engine.request import NEVER, Sequence

type Edit = tuple[int, int, int, int]  # group, slot, index, block


class KVGroups:
    """The pools of one engine.

    Args:
      num_blocks: per group, blocks of its cache with the null block.
      block_sizes: S per group, tokens in one block.
    """

    def __init__(self, num_blocks: Seq[int], block_sizes: Seq[int]) -> None:
        if not num_blocks or len(num_blocks) != len(block_sizes) or min(block_sizes) < 1:
            raise ConfigError(f"KV groups need a size and a count each, got {block_sizes} and {num_blocks}")
        self.pools = [BlockPool(n) for n in num_blocks]
        self.block_sizes = tuple(block_sizes)
        self.alignment = math.lcm(*block_sizes)  # a prefix ends at a block's end in every group

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    @property
    def usage(self) -> float:
        """The fullest pool's part of held blocks, 0 … 1."""
        return max(1 - pool.num_free / pool.num_usable for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> list[int]:
        """Per group, the blocks that hold so many tokens."""
        return [-(-num_tokens // size) for size in self.block_sizes]

    def find_prefix(self, seq: Sequence, limit: int) -> tuple[int, list[list[int]]]:
        """The longest prefix of at most `limit` tokens that every group has: its length and the blocks per group.

        Keys are computed no further than the first miss.
        """
        found: list[list[int]] = [[] for _ in self.pools]
        if seq.key_root is None:
            return 0, found
        length = limit // self.alignment * self.alignment
        for group, (pool, size) in enumerate(zip(self.pools, self.block_sizes, strict=True)):
            keys, blocks = seq.block_keys[group], found[group]
            for index in range(length // size):
                if index >= len(keys):
                    extend_keys(keys, seq.key_root, seq.token_ids, size, index + 1)
                block = pool.find(keys[index])
                if block == 0:
                    break
                blocks.append(block)
            length = min(length, len(blocks) * size) // self.alignment * self.alignment
        return length, [blocks[: length // size] for blocks, size in zip(found, self.block_sizes, strict=True)]

    def admit(self, seq: Sequence, num_tokens: int, shared: list[list[int]], reserve: Seq[int]) -> bool:
        """Gives `seq` the `shared` blocks and new ones up to `num_tokens`, if `reserve` blocks per group stay free.

        False, and nothing done, when some group has too few.
        """
        wanted = self.blocks_for(num_tokens)
        for pool, want, blocks, spare in zip(self.pools, wanted, shared, reserve, strict=True):
            revived = sum(map(pool.is_free, blocks))
            if pool.num_free < want - len(blocks) + revived + spare:
                return False
        for group, (pool, want, blocks) in enumerate(zip(self.pools, wanted, shared, strict=True)):
            for block in blocks:  # before any take, which could reuse them
                pool.share(block)
            seq.block_ids[group] = blocks + [pool.take() for _ in range(want - len(blocks))]
            seq.num_findable[group] = len(blocks)
        self._measure(seq)
        return True

    def grow(self, seq: Sequence, num_tokens: int, edits: list[Edit]) -> bool:
        """Gives a running sequence room for `num_tokens` and notes the new blocks in `edits`; False: nothing done."""
        missing = [want - len(blocks) for want, blocks in zip(self.blocks_for(num_tokens), seq.block_ids, strict=True)]
        if any(pool.num_free < count for pool, count in zip(self.pools, missing, strict=True)):
            return False
        for group, count in enumerate(missing):
            blocks = seq.block_ids[group]
            for _ in range(count):
                block = self.pools[group].take()
                edits.append((group, seq.slot, len(blocks), block))
                blocks.append(block)
        self.capacity_of(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """Takes all blocks back; those with keys stay findable until they are reused."""
        for group, pool in enumerate(self.pools):
            pool.release(seq.block_ids[group])
            seq.block_ids[group] = []
        seq.capacity = 0
        seq.next_key_length = NEVER

    def offer(self, seq: Sequence, num_tokens: int) -> None:
        """Makes the full blocks of the first `num_tokens` findable: tokens known, their step dispatched."""
        if seq.key_root is None:
            return
        for group, (pool, size) in enumerate(zip(self.pools, self.block_sizes, strict=True)):
            full, keys, blocks = num_tokens // size, seq.block_keys[group], seq.block_ids[group]
            if full <= seq.num_findable[group]:
                continue
            if full > len(keys):
                extend_keys(keys, seq.key_root, seq.token_ids, size, full)
            for index in range(seq.num_findable[group], full):
                pool.offer(blocks[index], keys[index])
            seq.num_findable[group] = full
        self._measure(seq)

    def forget(self, seq: Sequence) -> None:
        """Nobody finds what `seq` computed or shared any more, whoever holds it: it cannot be trusted."""
        for pool, keys in zip(self.pools, seq.block_keys, strict=True):
            for block in filter(None, map(pool.find, keys)):
                pool.forget(block)

    def forget_all(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while a sequence holds a block."""
        if any(pool.num_free != pool.num_usable for pool in self.pools):
            return False
        for pool in self.pools:
            pool.forget_all()
        return True

    def capacity_of(self, seq: Sequence) -> None:
        seq.capacity = min(len(blocks) * size for blocks, size in zip(seq.block_ids, self.block_sizes, strict=True))

    def _measure(self, seq: Sequence) -> None:
        self.capacity_of(seq)
        if seq.key_root is not None:
            seq.next_key_length = min(
                (count + 1) * size for count, size in zip(seq.num_findable, self.block_sizes, strict=True)
            )

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless the pools are sound and their references are those of `holders`."""
        counts: list[dict[int, int]] = [{} for _ in self.pools]
        for seq in holders:
            for refs, blocks in zip(counts, seq.block_ids, strict=True):
                if len(set(blocks)) != len(blocks) or 0 in blocks:
                    raise RuntimeError(f"sequence {seq.seq_id} holds a block twice, or the null block: {blocks}")
                for block in blocks:
                    refs[block] = refs.get(block, 0) + 1
        for pool, refs in zip(self.pools, counts, strict=True):
            pool.check(refs)
