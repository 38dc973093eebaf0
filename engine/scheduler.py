"""The scheduler: who runs in the next step, with how many tokens and which blocks, and what a step's tokens mean.

Host only: plain Python, no device, no clock. It plans ahead of the tokens: `plan` may be
called while earlier plans are not committed, since lengths are known before tokens are.

Order. Running sequences first, decode rows before prefill chunks, then admissions; always
by (priority under that policy, arrival, sequence id). Nobody overtakes the head of the
waiting line, whatever it waits for (a slot, blocks, a constrained row): that is what keeps
fcfs from starving anybody. Under `priority` a steady stream of better requests does starve
the others, by intention. Only siblings of an `n > 1` request, which wait outside of the
line for the first one's prompt, let others pass.
"""

import bisect
import random

import msgspec

from octavo.configs.scheduler import SchedulerConfig
from octavo.engine.admission import RequestLimits, check_request, level_of, slot_params, stop_token_ids
from octavo.engine.buckets import PROMPT, VARIANTS, Ladder, Program
from octavo.engine.draft import Chunk, Draft
from octavo.engine.errors import RequestError
from octavo.engine.invariants import check_partition, check_sequences
from octavo.engine.kv_groups import KVGroups
from octavo.engine.output import append_tokens, gather_prompt_logprobs, stop_reason, token_logprobs
from octavo.engine.plan import Plan, SampledHost, SlotLoad
from octavo.engine.prefix_cache import root_key
from octavo.engine.request import FinishReason, Request, Sequence, SequenceStatus, TokenEvent, TopLogprobs
from octavo.engine.waiting import WaitingLine

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]

NOT_FINITE = "the model gave a value that is not a finite number"
_PROMPT_LEVEL = VARIANTS.index(PROMPT)
_RUNNING, _WAITING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED


class SchedulerStats(msgspec.Struct):
    """Counters since the start."""

    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts that looked into the prefix cache
    prefix_hits: int = 0  # tokens of them that it had
    prompt_tokens: int = 0  # of admitted sequences
    generation_tokens: int = 0  # committed


class Scheduler:
    """All sequences of one engine, from `add` to their last event.

    Args:
      config: limits and policy.
      ladder: the compiled programs, which cap a step as long as few of them are ready.
      groups: the KV cache's blocks.
    """

    def __init__(self, config: SchedulerConfig, ladder: Ladder, groups: KVGroups) -> None:
        self.config = config
        self.limits = RequestLimits.of(config, groups)
        self.stats = SchedulerStats()
        self._ladder = ladder
        self._groups = groups
        self._rng = random.Random(config.seed)
        self._next_seq_id = 0
        self._next_step = 0
        self._live: dict[int, Sequence] = {}  # by seq_id: everything not finished
        self._requests: dict[str, dict[int, Sequence]] = {}  # by request_id, then seq_id: the same
        self._line = WaitingLine()
        self._running: list[Sequence] = []  # by order
        self._some_finished = False  # _running holds finished ones
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._free_constrained = list(range(config.max_constrained_rows - 1, -1, -1))
        self._watermark = [int(config.watermark * pool.num_usable) for pool in groups.pools]
        self._capacities = _Capacities(ladder)
        self._filled: list[Sequence] = []  # of the plan that is not dispatched yet
        self._chunks: dict[int, list[Chunk]] = {}  # by step in flight

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence has not had its last event."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self._running)

    @property
    def kv_usage(self) -> float:
        """The fullest pool's part of held blocks, 0 … 1."""
        return self._groups.usage

    # Requests come and go.

    def check(self, request: Request, *, id_is_free: bool = False) -> None:
        """Raises RequestError, with numbers, for a request that could never be served. Any thread may call it.

        `id_is_free`: whoever has this id now will be aborted before `request` is added.
        """
        check_request(request, self.limits)
        if request.request_id in self._requests and not id_is_free:
            raise RequestError(f"request_id {request.request_id!r} is in use", "request_id")

    def add(self, request: Request) -> None:
        """Takes a request that `check` let pass: one sequence for each of its samples."""
        root = self._root_key(request)
        first, *others = (self._make_sequence(request, index, root) for index in range(request.params.n))
        family = {seq.seq_id: seq for seq in (first, *others)}
        self._live.update(family)
        self._requests.setdefault(request.request_id, {}).update(family)
        self._line.push(first)
        self._line.hold(first, others)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """Ends a request, or one sample of it, at whatever stage; one that is unknown or finished gives no events."""
        family = [seq for seq in self._requests.get(request_id, {}).values() if index in (None, seq.index)]
        for seq in family:
            self._finish(seq)
        self._drop_finished()
        return [_last_event(seq, FinishReason.ABORT) for seq in family]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while a sequence runs."""
        return self._groups.forget_all()

    def _make_sequence(self, request: Request, index: int, root: bytes | None) -> Sequence:
        config, seed = self.config, request.params.seed
        seq = Sequence(
            self._next_seq_id,
            request,
            index,
            seed=self._rng.getrandbits(32) if seed is None else (seed + index) % 2**32,
            max_model_len=config.max_model_len,
            stop_ids=stop_token_ids(request, config.vocab_size),
            level=level_of(request, config.cuts_are_plain),
            num_groups=self._groups.num_groups,
            key_root=root,
            priority=request.priority if config.policy == "priority" else 0,
        )
        self._next_seq_id += 1
        return seq

    def _root_key(self, request: Request) -> bytes | None:
        if self.config.enable_prefix_caching:
            return root_key([] if request.cache_salt is None else [("salt", request.cache_salt)])
        # Siblings share the prompt in any case, under a key that nobody else can make.
        return root_key([("request", str(self._next_seq_id))]) if request.params.n > 1 else None

    # One step ahead.

    def plan(self, now: float = 0.0) -> Plan | None:
        """The next step, or None when nothing can run before an earlier one is committed (or a request comes).

        Args:
          now: when this is, in seconds; for the events of sequences that it starts.

        What it counts on (blocks, slots, lengths) is taken at once: every plan must be launched, in order.
        """
        if len(self._chunks) >= self.config.max_in_flight:
            raise RuntimeError(f"{len(self._chunks)} steps are in flight, at most {self.config.max_in_flight}")
        draft = Draft(now)
        self._place_decodes(draft)
        for seq in draft.filling:
            self._place_chunk(seq, draft)
        self._admit(draft)
        if not draft.num_tokens:
            return None
        plan = draft.to_plan(self._next_step, self._ladder)
        self._next_step += 1
        self._filled = draft.filled
        self._chunks[plan.step] = draft.chunks
        return plan

    def _place_decodes(self, draft: Draft) -> None:
        """A token for every running sequence that has one to compute; those with more are left in `draft.filling`."""
        seq_ids, slots, level = draft.decode_ids, draft.decode_slots, 0
        for seq in self._running:  # a preemption pops from its end, never what was visited
            if seq.filling:
                draft.filling.append(seq)
                continue
            if seq.num_tokens >= seq.max_length:
                continue  # its last token is in flight
            computed = seq.num_computed + 1
            if computed > seq.capacity and not self._make_room(seq, computed, draft):
                break  # it was the last, and had to go itself
            seq.num_computed = computed
            seq.num_tokens += 1
            seq.num_pending += 1
            seq_ids.append(seq.seq_id)
            slots.append(seq.slot)
            if seq.level > level:
                level = seq.level
        draft.level = level
        draft.num_tokens = len(seq_ids)

    def _make_room(self, seq: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Blocks for `num_tokens`, from the last ones in order if need be: these have no row in this plan yet."""
        while not self._groups.grow(seq, num_tokens, draft.edits):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to its place in the line. What it has in flight is still committed."""
        self._free(seq)
        seq.status = _WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._line.push(seq)

    def _place_chunk(self, seq: Sequence, draft: Draft) -> None:
        """As many of its known tokens as the step has room for."""
        start, length = seq.num_computed, seq.num_tokens
        room = self._room(seq, start, draft)
        if room <= 0:
            return
        stop = min(length, start + room)
        last, echo = stop == length, seq.request.params.max_tokens == 0
        wants_prompt_logprobs = _wants_prompt_logprobs(seq, start)
        samples = last and not echo
        level = _PROMPT_LEVEL if wants_prompt_logprobs else seq.level if samples else 0
        draft.level = max(draft.level, level)
        draft.num_tokens += stop - start
        draft.filled.append(seq)
        if samples and stop - start == 1:
            draft.decode_ids.append(seq.seq_id)
            draft.decode_slots.append(seq.slot)
        else:
            if wants_prompt_logprobs or echo:
                draft.chunks.append(Chunk(seq, start, stop, len(draft.prefill)))
            draft.prefill.append((seq.seq_id, seq.slot, stop - start, int(samples)))
        seq.num_computed = stop
        if last:
            seq.filling = False
            seq.num_pending += 1  # without a sample, too, its end is in flight
            seq.num_tokens += 1

    def _room(self, seq: Sequence, start: int, draft: Draft) -> int:
        """Tokens that the step still has for a sequence that stands at `start`: the budget, and what is compiled."""
        level = max(draft.level, _PROMPT_LEVEL if _wants_prompt_logprobs(seq, start) else seq.level)
        budget = min(self.config.max_num_batched_tokens, self._capacities.of(level))
        return budget - draft.num_tokens

    def _admit(self, draft: Draft) -> None:
        """Lets the head of the line in for as long as everything it needs is there."""
        while self._free_slots and draft.num_tokens < self.config.max_num_batched_tokens:
            seq = self._line.head()
            if seq is None or seq.num_pending:
                return  # with tokens in flight, the host does not know yet what its slot is loaded with
            if seq.request.params.needs_constrained_row and not self._free_constrained:
                return
            length = seq.num_tokens
            cached, shared = self._groups.find_prefix(seq, length - 1 if self._may_reuse(seq) else 0)
            at_once = not self.config.enable_chunked_prefill and draft.num_tokens > 0
            if self._room(seq, cached, draft) < (length - cached if at_once else 1):
                return
            if not self._groups.admit(seq, length, shared, self._reserve(seq)):
                return
            self._line.pop()
            self._start(seq, cached, draft)
            self._place_chunk(seq, draft)

    def _may_reuse(self, seq: Sequence) -> bool:
        if seq.prompt_logprobs is not None:
            return False  # they come from computing the prompt
        return self.config.enable_prefix_caching or (seq.index > 0 and seq.num_preemptions == 0)

    def _reserve(self, seq: Sequence) -> list[int]:
        """Blocks per group to leave free for the growth of others; more when `seq` lost its place to it before."""
        if not self._running:
            return [0] * self._groups.num_groups
        growth = len(self._running) if seq.num_preemptions else 0
        return [max(watermark, growth) for watermark in self._watermark]

    def _start(self, seq: Sequence, cached: int, draft: Draft) -> None:
        """Gives it a slot, and has the slot loaded with all that is known."""
        if seq.num_cached_tokens < 0:  # it never ran before
            seq.token_ids = seq.token_ids.copy()
            seq.num_cached_tokens = cached
            seq.scheduled_time = draft.now
            self.stats.prompt_tokens += seq.prompt_len
            self.stats.prefix_queries += seq.prompt_len if self._may_reuse(seq) else 0
            self.stats.prefix_hits += cached
        seq.status = _RUNNING
        seq.filling = True
        seq.num_computed = cached
        seq.slot = self._free_slots.pop()
        if seq.request.params.needs_constrained_row:
            seq.constrained_row = self._free_constrained.pop()
        bisect.insort(self._running, seq, key=_order)
        draft.loads.append(
            SlotLoad(
                slot=seq.slot,
                token_ids=seq.token_ids.copy(),
                prompt_len=seq.prompt_len,
                num_computed=cached,
                block_ids=[blocks.copy() for blocks in seq.block_ids],
                params=slot_params(seq, self.config.vocab_size),
                constrained_row=seq.constrained_row,
            )
        )

    def dispatched(self, plan: Plan) -> None:
        """The step is on its way: known tokens that it computes may be reused by whatever is planned next."""
        if plan.step != self._next_step - 1:
            raise RuntimeError(f"step {plan.step} was dispatched, {self._next_step - 1} was planned last")
        for seq in self._filled:
            self._groups.offer(seq, min(seq.num_computed, len(seq.token_ids)))
            if seq.num_computed >= seq.prompt_len:
                self._line.release(seq)
        self._filled = []

    # What came of it.

    def commit(self, plan: Plan, sampled: SampledHost) -> list[TokenEvent]:
        """Takes a step's tokens, in the order of plans; a sequence that ended meanwhile drops its own."""
        events: list[TokenEvent] = []
        for chunk in self._chunks.pop(plan.step):
            if chunk.seq.status is not _FINISHED:
                self._commit_chunk(chunk, sampled, events)
        live, samples, num_new = self._live, plan.samples, 0
        tokens, accepted, finite = sampled.tokens.tolist(), sampled.num_accepted.tolist(), sampled.finite.tolist()
        for row, seq_id in enumerate(plan.seq_ids):
            seq = live.get(seq_id)
            if seq is None or not samples[row]:
                continue
            seq.num_pending -= 1
            if not finite[row]:
                events.append(self._fail(seq))
                continue
            new = tokens[row]
            if accepted[row] != 1 or len(new) != 1:
                new = self._accept(seq, new[: accepted[row]])
            reason = append_tokens(seq, new)
            num_new += len(new)
            length = len(seq.token_ids)
            if length >= seq.next_key_length:
                self._groups.offer(seq, min(length, seq.num_computed))
            num_top = seq.request.params.logprobs
            events.append(
                TokenEvent(
                    seq.request.request_id,
                    seq.index,
                    new,
                    None if num_top is None else token_logprobs(sampled, row, new, num_top),
                    None if seq.prompt_logprobs is None else _take_prompt_logprobs(seq),
                    reason,
                    stop_reason(seq, new[-1]) if reason is FinishReason.STOP else None,
                    seq.num_cached_tokens,
                    seq.scheduled_time,
                )
            )
            if reason is not None:
                self._finish(seq)
        self.stats.generation_tokens += num_new
        self._drop_finished()
        return events

    @staticmethod
    def _accept(seq: Sequence, new: list[int]) -> list[int]:
        """Drafts were accepted: the sequence is longer than its plan, which counts on one token, thought."""
        seq.num_tokens += len(new) - 1
        if seq.status is _RUNNING:
            seq.num_computed += len(new) - 1
        return new

    def _commit_chunk(self, chunk: Chunk, sampled: SampledHost, events: list[TokenEvent]) -> None:
        """Prompt log-probabilities, and the end of a sequence that wanted no output."""
        seq = chunk.seq
        if _wants_prompt_logprobs(seq, chunk.start):
            if sampled.prompt_logprobs is None:
                raise RuntimeError("the step was to give prompt log-probabilities and did not")
            if not gather_prompt_logprobs(seq, sampled.prompt_logprobs, chunk.offset, chunk.start, chunk.stop):
                events.append(self._fail(seq))
                return
        if seq.request.params.max_tokens == 0 and chunk.stop == seq.prompt_len:
            self._finish(seq)
            events.append(_last_event(seq, FinishReason.LENGTH, prompt_logprobs=_take_prompt_logprobs(seq)))

    def _fail(self, seq: Sequence) -> TokenEvent:
        """Ends one sequence whose numbers went bad; what it computed is not reused."""
        self._groups.forget(seq)
        self._finish(seq)
        return _last_event(seq, FinishReason.ERROR, error=NOT_FINITE)

    def _finish(self, seq: Sequence) -> None:
        """Lets go of everything at once; whoever gets it next runs in a later step. `_drop_finished` must follow."""
        if seq.status is _RUNNING:
            self._free(seq)
        seq.status = _FINISHED
        self._some_finished = True
        del self._live[seq.seq_id]
        family = self._requests[seq.request.request_id]
        del family[seq.seq_id]
        if not family:
            del self._requests[seq.request.request_id]
        self._line.release(seq)

    def _free(self, seq: Sequence) -> None:
        self._groups.release(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1
        if seq.constrained_row >= 0:
            self._free_constrained.append(seq.constrained_row)
            seq.constrained_row = -1
        seq.filling = False

    def _drop_finished(self) -> None:
        if self._some_finished:
            self._running = [seq for seq in self._running if seq.status is _RUNNING]
            self._line.tidy(self.num_waiting)
            self._some_finished = False

    def check_invariants(self) -> None:
        """Raises RuntimeError unless host state is consistent; for tests and debugging."""
        self._groups.check(self._running)
        check_sequences(self._running, self._line.members(), self._live)
        held = [seq.slot for seq in self._running]
        check_partition("slot", self._free_slots, held, self.config.max_num_seqs)
        rows = [seq.constrained_row for seq in self._running if seq.constrained_row >= 0]
        check_partition("constrained row", self._free_constrained, rows, self.config.max_constrained_rows)


class _Capacities:
    """Per variant, the tokens that a mixed step can hold; computed again only when more programs are ready."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._ready: frozenset[Program] | None = None
        self._tokens: list[int] = []

    def of(self, level: int) -> int:
        if self._ready is not self._ladder.ready:  # a new set each time one is added
            self._ready = self._ladder.ready
            self._tokens = [self._ladder.capacity(variant) for variant in VARIANTS]
        return self._tokens[level]


def _order(seq: Sequence) -> tuple[int, float, int]:
    return seq.order


def _wants_prompt_logprobs(seq: Sequence, start: int) -> bool:
    """Whether a chunk from `start` on has any to give: what follows the last prompt token is output."""
    return seq.prompt_logprobs is not None and start + 1 < seq.prompt_len


def _take_prompt_logprobs(seq: Sequence) -> list[TopLogprobs | None] | None:
    entries, seq.prompt_logprobs = seq.prompt_logprobs, None
    return entries


def _last_event(
    seq: Sequence,
    reason: FinishReason,
    *,
    error: str | None = None,
    prompt_logprobs: list[TopLogprobs | None] | None = None,
) -> TokenEvent:
    return TokenEvent(
        seq.request.request_id,
        seq.index,
        [],
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        num_cached_tokens=max(seq.num_cached_tokens, 0),
        scheduled_time=seq.scheduled_time,
        error=error,
    )
