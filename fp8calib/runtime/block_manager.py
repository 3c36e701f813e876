"""Which blocks belong to which sequence.

A sequence has one block table for each group of layers: its block ids in order, NO_BLOCK where a
window has moved on and the block was given back. Blocks are counted by reference, so that sequences
can hold the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8calib.runtime.kv_store import CacheGroup

NO_BLOCK = -1


class BlockPool:
    """The blocks of one group."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._references) - len(self._free)

    def take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)


class BlockManager:
    """Hands out the blocks of all groups; tables are changed in place."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int
    ) -> None:
        self.block_size = block_size
        self.pools = [BlockPool(count) for count in num_blocks]
        self._windows = [group.window for group in groups]

    def new_tables(self) -> list[list[int]]:
        """The block tables of a sequence that holds nothing."""
        return [[] for _ in self.pools]

    def grow(self, tables: list[list[int]], num_computed: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens, of which `num_computed` are stored; first give back
        the blocks that no further token can see. False, with nothing taken, when too few are free.
        """
        for table, pool, window in zip(tables, self.pools, self._windows, strict=True):
            if window is not None:
                self._release_unseen(table, pool, num_computed + 1 - window)
        needed = -(-num_tokens // self.block_size)
        missing = [max(0, needed - len(table)) for table in tables]
        pairs = list(zip(self.pools, missing, strict=True))
        if any(count > pool.num_free for pool, count in pairs):
            return False
        for table, (pool, count) in zip(tables, pairs, strict=True):
            table += pool.take(count)
        return True

    def _release_unseen(self, table: list[int], pool: BlockPool, first_seen: int) -> None:
        block = first_seen // self.block_size - 1
        while block >= 0 and table[block] != NO_BLOCK:
            pool.release([table[block]])
            table[block] = NO_BLOCK
            block -= 1

    def free(self, tables: list[list[int]]) -> None:
        """Give back all blocks of a sequence."""
        for table, pool in zip(tables, self.pools, strict=True):
            pool.release(block for block in table if block != NO_BLOCK)
            table.clear()
