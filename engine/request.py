"""The nouns of a request's life: SamplingParams, Request, Sequence, TokenEvent.

Token ids only: no text, no tokenizer. SamplingParams and Request are checked
when they are made; what depends on the model (vocabulary, lengths, pool size)
is checked by `Scheduler.check`, so nothing later has to doubt them.
"""

import enum
import math
import sys

import msgspec

from octavo.engine.checks import check_integer, check_number, check_strings, check_token_ids, shown
from octavo.engine.errors import RequestError

MAX_N = 16384  # samples of one request
MAX_TEMPERATURE = 1e6  # beyond these two, float32 on the device would overflow
MIN_REPETITION = 1e-3
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_LOGIT_BIAS = 1024  # entries of the sparse bias a slot can hold
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128  # token sequences
MAX_BAD_WORD_LEN = 16  # tokens each
NEVER = sys.maxsize  # a length that no sequence reaches


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one request; the names and defaults are vLLM's.

    Raises RequestError, with `field` set, for a value out of its range. Bools are
    not numbers here, and NaN and infinity are refused everywhere.

    Attributes:
      n: samples of the prompt, 1 … 16384; they run as sequences of their own.
      presence_penalty, frequency_penalty: in [-2, 2], over output tokens.
      repetition_penalty: in [0.001, 1000], over prompt and output tokens; 1 is off.
      temperature: in [0, 1e6]; 0 is greedy.
      top_p: in (0, 1]; 1 is off.
      top_k: 0 or -1 is off, and so is a number from the vocabulary's size on.
      min_p: in [0, 1], relative to the likeliest token; 0 is off.
      seed: in [-2**63, 2**63). Sample i uses (seed + i) mod 2**32, so seeds that are
        equal modulo 2**32 give the same tokens. None draws one per sample.
      stop: one string or several (at most 64 of 1,024 characters); matched by the text edge, which needs `detokenize`.
      stop_token_ids: end the output, beside EOS; at most 128 with EOS.
      bad_words: strings that must not appear; the text edge tokenises them.
      ignore_eos: go on after EOS. stop_token_ids still stop.
      max_tokens: output tokens at most; 0 computes the prompt only (for its log-probabilities),
        None is resolved by the text edge.
      min_tokens: EOS and stop ids are masked for as many tokens.
      logprobs, prompt_logprobs: top log-probabilities per output or prompt token; 0 gives
        the token's own alone, None gives nothing.
      logit_bias: token id to a number in [-100, 100], at most 1024.
      allowed_token_ids: only these may be sampled.
      detokenize, skip_special_tokens, spaces_between_special_tokens,
      include_stop_str_in_output: for the text edge.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, MAX_N)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, 1 / MIN_REPETITION)
        check_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_integer("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0, 1)
        check_integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        check_integer("max_tokens", self.max_tokens, 0, optional=True)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", "min_tokens"
            )
        check_integer("logprobs", self.logprobs, 0, optional=True)
        check_integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        for name in _FLAGS:
            if type(flag := getattr(self, name)) is not bool:
                raise RequestError(f"{name} must be true or false, got {shown(flag)}", name)
        self._check_stops()
        self._check_masks()

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            check_strings("stop", self.stop)
        if self.stop == "":
            raise RequestError("stop must not be an empty string: it would match at once", "stop")
        if len(self.stop_strings) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_LENGTH for s in self.stop_strings):
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters", "stop"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize", "stop")
        if self.stop_token_ids is not None:
            check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)

    def _check_masks(self) -> None:
        if self.bad_words is not None:
            check_strings("bad_words", self.bad_words)
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise RequestError(f"bad_words has {len(self.bad_words)} entries, at most {MAX_BAD_WORDS}", "bad_words")
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty: nothing could be sampled", "allowed_token_ids")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}", "logit_bias"
                )
            check_token_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS)
            for value in self.logit_bias.values():
                check_number("logit_bias", value, -100, 100)

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty without any."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def needs_constrained_row(self) -> bool:
        """Whether it needs counts or a mask over the whole vocabulary on the device."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.allowed_token_ids is not None
        )

    @property
    def changes_logits(self) -> bool:
        """Whether it draws from other logits than the model's."""
        return bool(self.needs_constrained_row or self.logit_bias or self.bad_words or self.min_tokens > 0)

    @property
    def cuts_tail(self) -> bool:
        """Whether it draws from the likelier tokens only."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine core is asked for: token ids in, token ids out.

    `params.max_tokens` is resolved to a number before a Request is made (the
    text edge knows the default and the limit), `bad_words_token_ids` holds
    `params.bad_words` tokenised, and `eos_token_ids` what the model declares.
    The prompt's ids are checked against the model by `Scheduler.check`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: list[list[int]] = []
    arrival_time: float = 0.0  # seconds, time.monotonic()
    priority: int = 0  # lower runs first
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise RequestError("request_id must be a string that is not empty", "request_id")
        check_integer("priority", self.priority, -(2**31), 2**31 - 1)
        check_number("arrival_time", self.arrival_time, -math.inf)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError("cache_salt must be a string", "cache_salt")
        if self.params.max_tokens is None:
            raise RequestError("max_tokens must be a number by the time a request reaches the engine", "max_tokens")


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sample of a request while the engine holds it: plain mutable host state.

    Attributes:
      seq_id: unique in the engine's life; plans refer to it.
      index: which of the request's `n` samples.
      token_ids: prompt and committed output; the request's own list until it first runs.
      num_computed: tokens whose KV is in the cache or will be once every
        dispatched step has run; what the next step starts from.
      num_pending: samples of dispatched steps not committed yet (0, 1, …).
      num_tokens: `len(token_ids) + num_pending`: how long the next plan sees it.
      max_length: it is never planned once `num_tokens` is that long.
      min_length: stop ids count only at positions from here on.
      stop_ids: EOS (unless ignored) and stop_token_ids, as far as the vocabulary holds them.
      slot: the device slot it owns while it runs, -1 otherwise.
      constrained_row: its row of the constrained pool, -1 for none.
      filling: it runs and has known tokens that no plan has computed yet.
      block_ids: per KV group, the blocks in order.
      capacity: tokens that the blocks of every group can hold.
      key_root: what the chain of block keys starts from; None: its blocks are never findable.
      block_keys: per KV group, the keys of its leading full blocks, as far as computed.
      num_findable: per KV group, leading blocks already offered to the prefix cache.
      next_key_length: committed length at which another block may become findable.
      num_cached_tokens: prompt tokens reused when first scheduled, -1 before that.
      scheduled_time: when that was, 0 before.
      level: index into VARIANTS that its samples need.
      prompt_logprobs: entries gathered so far, None when not wanted or already emitted.
      order: (priority, arrival, seq_id); lower runs first.
    """

    __slots__ = (
        "block_ids", "block_keys", "capacity", "constrained_row", "filling", "index", "key_root", "level",
        "max_length", "min_length", "next_key_length", "num_cached_tokens", "num_computed", "num_findable",
        "num_pending", "num_preemptions", "num_tokens", "order", "prompt_len", "prompt_logprobs", "request",
        "scheduled_time", "seed", "seq_id", "slot", "status", "stop_ids", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        request: Request,
        index: int,
        *,
        seed: int,
        max_model_len: int,
        stop_ids: frozenset[int],
        level: int,
        num_groups: int,
        key_root: bytes | None,
        priority: int,
    ) -> None:
        params = request.params
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.token_ids = request.prompt_token_ids
        self.prompt_len = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_tokens = self.prompt_len
        # Without output, too, the prompt is computed, and its one result is then in flight.
        self.max_length = min(self.prompt_len + (params.max_tokens or 1), max(max_model_len, self.prompt_len + 1))
        self.min_length = self.prompt_len + params.min_tokens
        self.stop_ids = stop_ids
        self.slot = -1
        self.constrained_row = -1
        self.filling = False
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.capacity = 0
        self.key_root = key_root
        self.block_keys: list[list[bytes]] = [[] for _ in range(num_groups)]
        self.num_findable = [0] * num_groups
        self.next_key_length = NEVER
        self.num_cached_tokens = -1
        self.scheduled_time = 0.0
        self.num_preemptions = 0
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.level = level
        self.prompt_logprobs: list[TopLogprobs | None] | None = None
        if index == 0 and params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_len
        self.order = (priority, request.arrival_time, seq_id)


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen (or prompt) token and the k likeliest.

    Raw: of the model's own distribution, before penalties and temperature.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """What one committed step gave one sequence; the last one carries a finish reason.

    `token_ids` may be empty (an abort). `prompt_logprobs` comes once, with the
    first event of sample 0: one entry a prompt token, None for the first.
    `stop_reason` is the stop token id, when one that the user named was hit. `scheduled_time` says when
    the sequence first ran, in seconds of time.monotonic(), 0 if it never did.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[TopLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    scheduled_time: float = 0.0
    error: str | None = None
