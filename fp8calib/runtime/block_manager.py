"""Which blocks belong to which sequence, and which hold prefixes that others can use.

A sequence has one block table for each group of layers: its block ids in order, NO_BLOCK where a
window has moved on and the block was given back. Blocks are counted by reference, so that sequences
can hold the same one. A full block can be found again by the hash of all tokens up to its end; it
stays in the cache after its last sequence has gone, until its memory is needed (least recently used
first).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from fp8calib.runtime.kv_store import CacheGroup

NO_BLOCK = -1

BlockTable = array
"""Of int32, so that it can be copied into a tensor as it is."""


class BlockPool:
    """The blocks of one group."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}  # of cached blocks
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached and free, oldest first

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Blocks for new tokens, each with one reference."""
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._cached[self._hashes.pop(block)]
        return block

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hashes:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def find(self, block_hash: bytes) -> int | None:
        """The block with these contents, if there is one."""
        return self._cached.get(block_hash)

    def share(self, block: int) -> None:
        """One more reference to a cached block."""
        self._unused.pop(block, None)
        self._references[block] += 1

    def cache(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable, unless another has the same contents."""
        if block_hash not in self._cached and block not in self._hashes:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def forget_cached(self) -> None:
        """Make no block findable any more."""
        self._free += self._unused
        for index in (self._cached, self._hashes, self._unused):
            index.clear()


class BlockManager:
    """Hands out the blocks of all groups; tables are changed in place."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int
    ) -> None:
        self.block_size = block_size
        self.pools = [BlockPool(count) for count in num_blocks]
        self._windows = [group.window for group in groups]

    def new_tables(self) -> list[BlockTable]:
        """The block tables of a sequence that holds nothing."""
        return [array("i") for _ in self.pools]

    def grow(self, tables: list[BlockTable], num_computed: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens, of which `num_computed` are stored; first give back
        the blocks that no further token can see. False, with nothing taken, when too few are free.
        """
        for table, pool, window in zip(tables, self.pools, self._windows, strict=True):
            if window is not None:
                self._release_unseen(table, pool, num_computed + 1 - window)
        needed = -(-num_tokens // self.block_size)
        if all(len(table) >= needed for table in tables):
            return True
        missing = [max(0, needed - len(table)) for table in tables]
        pairs = list(zip(self.pools, missing, strict=True))
        if any(count > pool.num_free for pool, count in pairs):
            return False
        for table, (pool, count) in zip(tables, pairs, strict=True):
            table.extend(pool.take(count))
        return True

    def _release_unseen(self, table: BlockTable, pool: BlockPool, first_seen: int) -> None:
        block = first_seen // self.block_size - 1
        while block >= 0 and table[block] != NO_BLOCK:
            pool.release([table[block]])
            table[block] = NO_BLOCK
            block -= 1

    def share_prefix(self, tables: list[BlockTable], hashes: Sequence[bytes]) -> int:
        """Fill empty tables with cached blocks: the longest prefix of the blocks of these hashes
        that every group has all of, or of which it has what a window still sees.

        Returns:
            How many tokens that is.
        """
        count = self._cached_prefix(hashes)
        for table, pool, window in zip(tables, self.pools, self._windows, strict=True):
            first = self._first_seen(count, window)
            table.extend([NO_BLOCK] * first)
            for block_hash in hashes[first:count]:
                block = pool.find(block_hash)
                assert block is not None
                pool.share(block)
                table.append(block)
        return count * self.block_size

    def _cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many blocks the longest usable prefix has."""
        count = len(hashes)
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None:
                found = (n for n in range(count) if pool.find(hashes[n]) is None)
                count = next(found, count)
        windows = [(p, w) for p, w in zip(self.pools, self._windows, strict=True) if w is not None]
        while count and not all(
            pool.find(block_hash) is not None
            for pool, window in windows
            for block_hash in hashes[self._first_seen(count, window) : count]
        ):
            count -= 1
        return count

    def _first_seen(self, num_blocks: int, window: int | None) -> int:
        """The first of `num_blocks` full blocks that the token after them sees."""
        if window is None:
            return 0
        return max(0, num_blocks * self.block_size + 1 - window) // self.block_size

    def cache(self, tables: list[BlockTable], hashes: Sequence[bytes], first: int) -> None:
        """Make the full blocks number `first` and later of a sequence findable, by their hashes."""
        for table, pool in zip(tables, self.pools, strict=True):
            for number in range(first, len(hashes)):
                if table[number] != NO_BLOCK:
                    pool.cache(table[number], hashes[number])

    def forget_cached(self) -> None:
        """Make no block findable any more: what they hold is out of date."""
        for pool in self.pools:
            pool.forget_cached()

    def free(self, tables: list[BlockTable]) -> None:
        """Give back all blocks of a sequence; the end of a prefix is evicted before its start."""
        for table, pool in zip(tables, self.pools, strict=True):
            pool.release(block for block in reversed(table) if block != NO_BLOCK)
            del table[:]
