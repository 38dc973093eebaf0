"""The ladder of compiled step shapes, and which of them a plan uses.

A program is (T tokens, R rows, variant). T == R means a decode-only program: one
token a row. Every other program is mixed and has the maximum number of rows.
Variants form a chain, each able to do all that the ones before it can.
"""

import dataclasses

PLAIN, FULL, LOGPROBS, PROMPT = VARIANTS = ("plain", "full", "logprobs", "prompt")
"""Greedy, temperature and seed (and cuts, where the sampler has them for all) | all of SamplingParams | top
log-probabilities too | and the prompt's."""

type Program = tuple[int, int, str]


@dataclasses.dataclass
class Ladder:
    """The programs of one engine.

    Attributes:
      programs: all of them, in the order in which they should be compiled.
      coarse: the first ones, which together can serve anything.
      early: the next ones, which start-up waits for as well: what a single stream runs on.
      ready: those that exist by now; progressive warm-up adds to it (a new set each time).
    """

    programs: tuple[Program, ...]
    coarse: tuple[Program, ...]
    early: tuple[Program, ...] = ()
    ready: frozenset[Program] = frozenset()

    @property
    def max_tokens(self) -> int:
        """The most tokens that one step can hold."""
        return max(tokens for tokens, _, _ in self.programs)

    def capacity(self, variant: str) -> int:
        """The most tokens that a mixed step of this variant can hold with the programs that are ready."""
        need = VARIANTS.index(variant)
        return max((t for t, rows, name in self.ready if t > rows and VARIANTS.index(name) >= need), default=0)

    def choose(self, num_rows: int, num_tokens: int, num_decode: int, variant: str) -> Program:
        """The cheapest ready program for a step of `num_rows` rows, `num_decode` of them single tokens."""
        decode_only = num_decode == num_rows
        need = VARIANTS.index(variant)
        best: Program | None = None
        best_cost: tuple[int, int] | None = None
        for program in self.ready:
            tokens, rows, name = program
            has = VARIANTS.index(name)
            if num_rows > rows or num_tokens > tokens or has < need or not (decode_only or tokens > rows):
                continue
            cost = (tokens, has)
            if best_cost is None or cost < best_cost:
                best, best_cost = program, cost
        if best is None:
            raise RuntimeError(f"no program fits {num_rows} rows, {num_tokens} tokens, variant {variant}")
        return best


def make_ladder(decode_rungs: tuple[int, ...], token_rungs: tuple[int, ...], platform: str) -> Ladder:
    """Every decode rung and token rung in the plain variant, coarser ones for what is asked for less often.

    Args:
      decode_rungs: row counts, increasing; the last is the maximum.
      token_rungs: token counts of mixed programs, increasing, above the maximum of rows.
      platform: cpu gets fewer programs, since each takes seconds to compile there.
    """
    max_rows, max_tokens = decode_rungs[-1], token_rungs[-1]
    coarse: list[Program] = [(max_tokens, max_rows, PROMPT), (max_rows, max_rows, LOGPROBS)]
    decode = [(r, r, PLAIN) for r in decode_rungs]
    mixed = [(t, max_rows, PLAIN) for t in token_rungs]
    if platform == "cpu":
        full_rows = sorted({decode_rungs[0], max_rows})
        full_tokens = [max_tokens]
    else:
        full_rows = sorted({*decode_rungs[::3], max_rows})
        full_tokens = sorted({token_rungs[0], max_tokens})
        coarse += [(max_tokens, max_rows, LOGPROBS)]
    full = [(r, r, FULL) for r in full_rows] + [(t, max_rows, FULL) for t in full_tokens]
    # One stream and a full house first, then what lies between.
    early = [decode[0], mixed[0]]
    fine = [decode[-1], mixed[-1], *full, *decode[1:-1], *mixed[1:-1]]
    programs = tuple(dict.fromkeys(coarse + early + fine))
    return Ladder(programs=programs, coarse=tuple(coarse), early=tuple(early))
