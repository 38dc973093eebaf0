"""A device for scheduler tests, in plain Python: block tables, slots and a KV cache whose every entry matters.

The KV entry of a position is a checksum of all earlier entries, read through the block
table, and of the token. The next token is a function of the last entry and the seed. So a
wrong block, a stale table, a lost token or a block reused too early changes what comes out.
"""

import dataclasses
import zlib

import numpy as np

from octavo.engine.buckets import VARIANTS, Ladder
from octavo.engine.plan import Plan, PromptLogprobs, SampledHost, SlotLoad
from octavo.engine.request import SamplingParams

VOCAB = 61
NUM_TOP = 3  # M


def entry(earlier: list[int], token: int) -> int:
    """The KV entry behind `earlier`, those of all positions before it."""
    return zlib.crc32(np.array([*earlier, token], np.int64).tobytes())


def choose(last_entry: int, seed: int) -> int:
    return zlib.crc32(f"{last_entry} {seed}".encode()) % VOCAB


def logprob_of(last_entry: int, token: int) -> float:
    return -float(zlib.crc32(f"{last_entry} logprob {token}".encode()) % 1000) / 64


def solo(prompt: list[int], params: SamplingParams, seed: int, eos: tuple[int, ...] = ()) -> list[int]:
    """What one sequence must give, whatever runs beside it."""
    entries: list[int] = []
    for token in prompt:
        entries.append(entry(entries, token))
    stops = {*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())}
    out: list[int] = []
    while len(out) < params.max_tokens:
        masked = stops if len(out) < params.min_tokens else set()
        token = pick(entries[-1], seed, masked)
        out.append(token)
        if token in stops and len(out) > params.min_tokens:
            break
        entries.append(entry(entries, token))
    return out


def pick(last_entry: int, seed: int, masked: set[int]) -> int:
    token = choose(last_entry, seed)
    while token in masked:
        token = (token + 1) % VOCAB
    return token


def prompt_logprobs(prompt: list[int]) -> list[float]:
    """Of every prompt token but the first."""
    entries: list[int] = []
    for token in prompt:
        entries.append(entry(entries, token))
    return [logprob_of(e, t) for e, t in zip(entries[:-1], prompt[1:], strict=True)]


@dataclasses.dataclass
class Slot:
    load: SlotLoad
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]  # per group


class FakeDevice:
    """Runs plans at once, in the order of launches, and refuses any that breaks a promise of `Plan`."""

    def __init__(self, ladder: Ladder, num_blocks: list[int], block_sizes: list[int], budget: int) -> None:
        self.ladder, self.block_sizes, self.budget = ladder, block_sizes, budget
        self.kv = [[[None] * size for _ in range(n)] for n, size in zip(num_blocks, block_sizes, strict=True)]
        self.slots: dict[int, Slot] = {}
        self.broken_tokens: set[int] = set()  # a row whose last token is one of these is not finite
        self.launched: list[Plan] = []

    def launch(self, plan: Plan) -> SampledHost:
        self.launched.append(plan)
        self._check_shape(plan)
        for load in plan.loads:
            self._load(load)
        for group, slot, index, block in plan.edits:
            table = self.slots[slot].tables[group]
            assert index == len(table), "an edit must append to its table"
            table.append(block)
        self._check_blocks(plan)
        return self._run(plan)

    def _check_shape(self, plan: Plan) -> None:
        tokens, rows, variant = plan.program
        n = len(plan.seq_ids)
        assert plan.program in self.ladder.ready
        assert n == len(plan.slots) == len(plan.q_lens) == len(plan.samples) > 0
        assert n <= rows and sum(plan.q_lens) <= min(tokens, self.budget)
        assert all(q == 1 for q in plan.q_lens[: plan.num_decode]) and all(plan.samples[: plan.num_decode])
        assert all(q >= 1 for q in plan.q_lens)
        assert tokens > rows or plan.num_decode == n
        assert len(set(plan.slots)) == n == len(set(plan.seq_ids))
        loaded = [load.slot for load in plan.loads]
        assert len(set(loaded)) == len(loaded) and set(loaded) <= set(plan.slots)
        assert len(plan.edits) <= n * len(self.block_sizes)
        assert {edit[1] for edit in plan.edits} <= set(plan.slots) - set(loaded)
        held = [load.constrained_row for load in plan.loads if load.constrained_row >= 0]
        assert len(set(held)) == len(held)
        assert variant in VARIANTS

    def _load(self, load: SlotLoad) -> None:
        assert 0 <= load.num_computed < len(load.token_ids)
        assert all(load.num_computed % size == 0 for size in self.block_sizes)
        self.slots[load.slot] = Slot(load, list(load.token_ids), load.num_computed, [list(b) for b in load.block_ids])

    def _check_blocks(self, plan: Plan) -> None:
        """Blocks cover all positions, and no row writes where another one of the step reads or writes."""
        for group, size in enumerate(self.block_sizes):
            written: dict[int, int] = {}
            for slot_id, q_len in zip(plan.slots, plan.q_lens, strict=True):
                slot = self.slots[slot_id]
                first, last = slot.num_computed // size, (slot.num_computed + q_len - 1) // size
                assert last < len(slot.tables[group]), "no block for a position"
                assert 0 not in slot.tables[group] and len(set(slot.tables[group])) == len(slot.tables[group])
                for block in slot.tables[group][first : last + 1]:
                    assert block not in written, "two rows write one block"
                    written[block] = slot_id
            for slot_id in plan.slots:
                for block in self.slots[slot_id].tables[group]:
                    assert written.get(block, slot_id) == slot_id, "a row reads what another writes"

    def _run(self, plan: Plan) -> SampledHost:
        num_tokens, num_rows, variant = plan.program
        level = VARIANTS.index(variant)
        tokens = np.full((num_rows, 1), 2**30, np.int32)
        finite = np.zeros(num_rows, bool)  # padded rows mean nothing
        prompt = np.full((4, num_tokens), np.nan)
        offset = 0
        for row, (slot_id, q_len) in enumerate(zip(plan.slots, plan.q_lens, strict=True)):
            slot = self.slots[slot_id]
            for i in range(q_len):
                position = slot.num_computed
                read = [self._read(slot, group, position) for group in range(len(self.kv))]
                assert all(r == read[0] for r in read)
                value = entry(read[0], slot.tokens[position])
                for group, size in enumerate(self.block_sizes):
                    self.kv[group][slot.tables[group][position // size]][position % size] = value
                if position + 1 < len(slot.tokens):
                    prompt[0, offset + i] = logprob_of(value, slot.tokens[position + 1])
                slot.num_computed += 1
            offset += q_len
            finite[row] = plan.samples[row] and slot.tokens[slot.num_computed - 1] not in self.broken_tokens
            if plan.samples[row]:
                params = slot.load.params
                masked = set(params.stop_ids) if slot.num_computed < params.min_length else set()
                token = pick(value, params.seed, masked)
                assert slot.num_computed == len(slot.tokens), "it samples before all known tokens are computed"
                slot.tokens.append(token)
                tokens[row, 0] = token
        top = level >= VARIANTS.index("logprobs")
        return SampledHost(
            tokens=tokens,
            num_accepted=np.ones(num_rows, np.int32),
            finite=finite,
            logprobs=-tokens.astype(np.float32),
            ranks=tokens[:, 0] + 1 if top else None,
            top_ids=tokens[:, :1] + np.arange(NUM_TOP, dtype=np.int32) if top else None,
            top_logprobs=np.zeros((num_rows, NUM_TOP), np.float32) if top else None,
            prompt_logprobs=_prompt_arrays(prompt[0]) if variant == "prompt" else None,
        )

    def _read(self, slot: Slot, group: int, position: int) -> list[int]:
        size, table = self.block_sizes[group], slot.tables[group]
        return [self.kv[group][table[p // size]][p % size] for p in range(position)]


def _prompt_arrays(logprob: np.ndarray) -> PromptLogprobs:
    width = len(logprob)
    return PromptLogprobs(
        logprob=logprob,
        rank=np.arange(width, dtype=np.int32),
        top_ids=np.zeros((width, NUM_TOP), np.int32),
        top_logprobs=np.zeros((width, NUM_TOP), np.float32),
    )
