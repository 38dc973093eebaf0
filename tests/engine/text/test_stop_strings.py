"""Stop strings over cuts: the result depends on the text alone."""

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.text.stop_strings import StopStrings

TEXT = st.text(alphabet="abA\n", max_size=30)
STOPS = st.lists(st.text(alphabet="abA\n", min_size=1, max_size=5), max_size=3)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include=include)
    out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a match, and of those the earliest start."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.lists(st.integers(0, 30)), st.booleans())
def test_every_cut_gives_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    bounds = [0, *sorted({c for c in cuts if c < len(text)}), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    out, stop = run(stops, pieces, include)
    assert ("".join(out), stop) == naive(stops, text, include)


def test_nothing_of_a_stop_string_is_given_out() -> None:
    """B001"""
    out, stop = run(["Observation:"], ["A", "ObSer", " Observ", "ation", ": x"])
    assert out == ["A", "ObSer", " ", "", ""]
    assert stop == "Observation:"


def test_held_text_comes_when_it_was_no_stop_string() -> None:
    out, stop = run(["Observation:"], ["Obs", "tacle"])
    assert out == ["", "Obstacle", ""]
    assert stop is None
    assert run(["ab"], ["a"]) == (["", "a"], None)


def test_a_match_counts_only_where_it_may() -> None:
    matcher = StopStrings(["ab"], include=False)
    assert matcher.push("xab", may_stop=False) == ("xab", None)
    assert matcher.push("ya", may_stop=False) == ("y", None)
    assert matcher.push("b") == ("", "ab"), "it ends in text that counts"


def test_long_stop_strings_cost_little() -> None:
    """The largest number and length of stop strings that a request may have, all nearly found all the time."""
    matcher = StopStrings(["a" * (1000 + i % 20) + "b" + "c" * (i % 3) for i in range(64)], include=False)
    begin = time.perf_counter()
    for _ in range(1500):
        matcher.push("a")
    assert time.perf_counter() - begin < 2


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=3), st.text("ab", max_size=20))
def test_no_more_is_held_than_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops, include=False)
    out, stop = matcher.push(text)
    if stop is None:
        held = [n for n in range(len(text) + 1) if any(s[:n] == text[len(text) - n :] for s in stops if len(s) > n)]
        assert len(text) - len(out) == max(held)
