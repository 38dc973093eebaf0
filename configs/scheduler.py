"""SchedulerConfig: the numbers that the scheduler decides by, resolved for one device and model."""

import dataclasses

from octavo.configs.errors import ConfigError
from octavo.configs.fields import check_types

POLICIES = ("fcfs", "priority")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know about the engine.

    Attributes:
      max_num_seqs: R, device slots; rows of a step at most.
      max_num_batched_tokens: T, token budget of a step.
      max_model_len: tokens of prompt and output together.
      vocab_size: V, the width of the logits; every token id must be below it.
      sampled_vocab_size: ids from here up have no string and are never drawn; by default V.
      max_constrained_rows: requests with penalties or allowed ids that run at once.
      max_logprobs: the most top log-probabilities a request may ask for.
      cuts_are_plain: whether programs of the plain variant know top_k, top_p and min_p.
      policy: fcfs, or priority (lower first, then arrival).
      enable_prefix_caching: reuse the blocks of equal prefixes.
      enable_chunked_prefill: cut a prompt when the budget is short; otherwise it waits for a
        step that holds it whole.
      watermark: fraction of each pool that an admission leaves free while others run.
      seed: of the generator that gives a seed to sequences whose request brings none.
      max_in_flight: plans that may be dispatched and not committed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    max_constrained_rows: int
    sampled_vocab_size: int | None = None
    max_logprobs: int = 20
    cuts_are_plain: bool = False
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    watermark: float = 0.01
    seed: int = 0
    max_in_flight: int = 2

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs "
                f"({self.max_num_seqs}), or a full batch leaves no room for a prompt"
            )
        if min(self.max_constrained_rows, self.max_logprobs) < 0:
            raise ConfigError("max_constrained_rows and max_logprobs must not be negative")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
