"""Names for the contents of full blocks: two with the same hash hold the same K and V.

A block's K and V depend on all tokens up to its end, and on how the layers store them; so its hash
is chained over the blocks before it and starts with a fingerprint of formats and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from fp8calib.runtime.kv_format import KVFormat

_DIGEST_SIZE = 16  # bytes; a prompt made to collide with another's would take 2**64 tries


def fingerprint(kv_format: KVFormat) -> bytes:
    """The start of every chain: what the pages of each layer hold, by which scales."""
    digest = blake2b(digest_size=_DIGEST_SIZE)
    layers = (kv_format.fp8_layers, kv_format.native_k, kv_format.native_v)
    digest.update(repr((kv_format.native, *map(sorted, layers))).encode())
    digest.update(repr((kv_format.fp8_format, kv_format.arithmetic)).encode())
    if kv_format.scales is not None:
        for index, layer in sorted(kv_format.scales.layers.items()):
            for kind, scale in layer.items():
                digest.update(f"{index} {kind} {scale.shape}".encode() + scale.tobytes())
    return digest.digest()


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, start: bytes
) -> None:
    """Append the hashes of those full blocks of `token_ids` that `hashes` does not have yet."""
    for number in range(len(hashes), len(token_ids) // block_size):
        block = token_ids[number * block_size : (number + 1) * block_size]
        parent = hashes[-1] if hashes else start
        tokens = np.asarray(block, dtype=np.int64).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=_DIGEST_SIZE).digest())
