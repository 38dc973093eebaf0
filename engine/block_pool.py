"""BlockPool: the blocks of one KV group, counted, shared, found by content and reused in LRU order.

Ids only; it knows neither tokens nor sequences. Block 0 is the null block, where
padding is written, and is never given out. A free block that still has a key can
be found and shared again until it is given out for something else.
"""

from octavo.configs.errors import ConfigError


class BlockPool:
    """Reference counts, content keys and the free list of `num_blocks` blocks (the null block included).

    The free list is a ring threaded through `_next` and `_prev`, whose head is the
    null block: blocks without a key come first, then those with one, least
    recently used first.
    """

    __slots__ = ("_by_key", "_key", "_next", "_prev", "_refs", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a block pool needs at least 2 blocks (one stays empty), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._refs = [0] * num_blocks
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    def take(self) -> int:
        """A free block, now with one reference; its old content is no longer findable.

        Raises RuntimeError when none is free: look at `num_free` first.
        """
        block = self._next[0]
        if block == 0:
            raise RuntimeError("no free block")
        after = self._next[block]
        self._next[0] = after
        self._prev[after] = 0
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None
        self._refs[block] = 1
        self.num_free -= 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that `find` gave."""
        if self._refs[block] == 0:
            self._unlink(block)
            self.num_free -= 1
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference to each; a sequence's blocks in order, so that its tail is reused first."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise RuntimeError(f"block {block} was released more often than taken")
            self._refs[block] = refs
            if refs == 0:
                self.num_free += 1
                self._link(block)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def find(self, key: bytes) -> int:
        """The block with this content, 0 for none. It stays there only if it is shared before the next `take`."""
        return self._by_key.get(key, 0)

    def offer(self, block: int, key: bytes) -> None:
        """Makes a held block findable, unless another block with this content already is."""
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def forget(self, block: int) -> None:
        """The block can no longer be found; those who hold it keep it."""
        key = self._key[block]
        if key is None:
            return
        del self._by_key[key]
        self._key[block] = None
        if self._refs[block] == 0:
            self._unlink(block)
            self._link(block)

    def forget_all(self) -> None:
        """No block can be found any more."""
        for block in list(self._by_key.values()):
            self.forget(block)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _link(self, block: int) -> None:
        """To the front of the free list without a key, to its end with one."""
        before = 0 if self._key[block] is None else self._prev[0]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after

    def check(self, expected_refs: dict[int, int] | None = None) -> None:
        """Raises RuntimeError unless every invariant holds; `expected_refs` are the references that holders count."""
        free, block, keyed = [], self._next[0], False
        while block != 0:
            if self._prev[self._next[block]] != block:
                raise RuntimeError(f"the free list is torn behind block {block}")
            if self._refs[block] != 0:
                raise RuntimeError(f"block {block} is free with {self._refs[block]} references")
            if keyed and self._key[block] is None:
                raise RuntimeError(f"block {block} without a key waits behind one with a key")
            keyed = self._key[block] is not None
            free.append(block)
            if len(free) > self.num_usable:
                raise RuntimeError("the free list does not end")
            block = self._next[block]
        if len(free) != self.num_free or len(set(free)) != len(free):
            raise RuntimeError(f"{len(free)} blocks in the free list, {self.num_free} counted")
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        if self._refs[0] != 0 or self._key[0] is not None:
            raise RuntimeError("the null block was given out")
        if len(held) + len(free) != self.num_usable:
            raise RuntimeError(f"{len(held)} held and {len(free)} free blocks, {self.num_usable} in the pool")
        keys = {key: block for block, key in enumerate(self._key) if key is not None}
        if keys != self._by_key:
            raise RuntimeError("keys and blocks do not agree")
        if expected_refs is not None and expected_refs != {block: self._refs[block] for block in held}:
            raise RuntimeError("the references counted are not those that sequences hold")
