"""Keys of full blocks: a chain of SHA-256 digests, so that equal keys mean equal prefixes.

A key covers every token from the sequence's start to the block's end and the
domains (salt, adapter) that the KV values depend on. Partial blocks have no key.
"""

import array
import hashlib
from collections.abc import Iterable

_VERSION = b"octavo prefix 1"


def root_key(domains: Iterable[tuple[str, str]] = ()) -> bytes:
    """What a chain starts from. A domain is (kind, value): kinds keep a salt "a" and an adapter "a" apart."""
    digest = hashlib.sha256(_VERSION)
    for domain in domains:
        for part in domain:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))  # no two lists of parts give the same bytes
            digest.update(data)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: list[int], block_size: int, num_blocks: int) -> None:
    """Appends to `keys` (of the leading blocks) until it holds `num_blocks`; all their tokens must be known."""
    if num_blocks * block_size > len(token_ids):
        raise RuntimeError(f"{num_blocks} blocks of {block_size} are not full with {len(token_ids)} tokens")
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        tokens = array.array("I", token_ids[start : start + block_size]).tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        keys.append(parent)
