"""Block keys: equal exactly when the prefix and its domains are equal."""

import pytest

from octavo.engine.prefix_cache import extend_keys, root_key


def keys(tokens: list[int], root: bytes | None = None, size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    extend_keys(chain, root or root_key(), tokens, size, len(tokens) // size)
    return chain


def test_a_key_covers_the_whole_prefix() -> None:
    a, b = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert a == keys([1, 2, 3, 4, 5, 6, 7, 8, 99])  # the partial block has none
    assert keys([1, 2, 3, 4, 1, 2, 3, 4])[0] != keys([1, 2, 3, 4, 1, 2, 3, 4])[1]


def test_extending_in_pieces_gives_the_same_chain() -> None:
    tokens = list(range(40))
    chain: list[bytes] = []
    for count in (1, 1, 4, 10):
        extend_keys(chain, root_key(), tokens, 4, count)
    assert chain == keys(tokens)


def test_unknown_tokens_are_never_hashed() -> None:
    with pytest.raises(RuntimeError, match="not full"):
        extend_keys([], root_key(), [1, 2, 3], 4, 1)


def test_domains_cannot_collide() -> None:
    """A salt never meets an adapter of the same name, nor two values one that joins them (B094)."""
    roots = [
        root_key(),
        root_key([("salt", "x")]),
        root_key([("adapter", "x")]),
        root_key([("salt", "")]),
        root_key([("salt", "x"), ("adapter", "y")]),
        root_key([("salt", "xadaptery")]),
        root_key([("saltx", "")]),
        root_key([("salt", "x\x00")]),
        root_key([("salt", "\ud800")]),
        root_key([("salt", "x" * 10**6)]),
    ]
    assert len(set(roots)) == len(roots)
    assert len({keys([1, 2, 3, 4], root)[0] for root in roots}) == len(roots)
