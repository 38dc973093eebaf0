"""What the engine says of itself: the load after a step, and the facts and limits that hold from start to end.

Plain values that both processes know; counters only ever grow.
"""

from typing import Any

import msgspec

from octavo.engine.admission import RequestLimits


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The load of an engine behind a step. A sample of a request counts as one.

    Attributes:
      running: samples that hold a slot.
      waiting: samples that hold none.
      kv_usage: the fullest pool's part of held blocks, 0 … 1.
      prompt_tokens: of admitted samples, since the start.
      generation_tokens: committed, since the start.
      prefix_queries: tokens of prompts that looked into the prefix cache, since the start.
      prefix_hits: tokens of them that it had.
      preemptions: since the start.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that is ready says of itself, once.

    Attributes:
      limits: what a request is checked against.
      max_length: tokens of prompt and output that one sample can have: max_model_len, or what the pool holds.
      max_num_seqs: samples that run at once.
      max_num_batched_tokens: token budget of a step.
      block_size: tokens in one KV block.
      num_blocks: KV blocks, the null block included.
      dtype: of weights and activations.
      kv_dtype: of the cache.
      platform: cpu, gpu or tpu.
      device_kind: the device's name.
      architecture: of the model, as its config.json names it.
      eos_token_ids: that the model's configs declare.
      default_sampling_params: the model's and the operator's, over SamplingParams' own.
    """

    limits: RequestLimits
    max_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    dtype: str
    kv_dtype: str
    platform: str
    device_kind: str
    architecture: str
    eos_token_ids: tuple[int, ...]
    default_sampling_params: dict[str, Any]

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size
