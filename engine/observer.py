"""What an AsyncEngine tells whoever keeps metrics: loads, latencies, ended requests. No names of metrics here."""

import dataclasses
from typing import Protocol

from octavo.engine.stats import EngineStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that ended, however it did. Times are seconds of time.monotonic(), durations seconds.

    Attributes:
      finish_reasons: of each sample: stop, length, abort or error.
      num_prompt_tokens: in the prompt, which the samples share.
      num_generation_tokens: of all samples, up to their stop strings.
      num_cached_tokens: of the prompt, from the prefix cache.
      max_tokens: that a sample could have had.
      n: samples.
      arrival_time: when it was submitted.
      scheduled_time: when the engine first ran it; None if it never did, or ended before that was known.
      first_token_time, last_token_time: when these came to this process; None without tokens.
      finish_time: when its last sample ended.
    """

    finish_reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    max_tokens: int
    n: int
    arrival_time: float
    scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finish_time: float

    @property
    def e2e_time(self) -> float:
        """From its arrival to its end."""
        return self.finish_time - self.arrival_time

    @property
    def queue_time(self) -> float | None:
        """Until it first ran."""
        return None if self.scheduled_time is None else max(0.0, self.scheduled_time - self.arrival_time)

    @property
    def prefill_time(self) -> float | None:
        """From there to the first token."""
        if self.scheduled_time is None or self.first_token_time is None:
            return None
        return self.first_token_time - self.scheduled_time

    @property
    def decode_time(self) -> float | None:
        """From the first token to the last."""
        if self.first_token_time is None or self.last_token_time is None:
            return None
        return self.last_token_time - self.first_token_time

    @property
    def inference_time(self) -> float | None:
        """From when it first ran to its last token."""
        if self.scheduled_time is None or self.last_token_time is None:
            return None
        return self.last_token_time - self.scheduled_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """The mean between tokens of a sample; None where no sample has two."""
        later_tokens = self.num_generation_tokens / self.n - 1
        return None if self.decode_time is None or later_tokens <= 0 else self.decode_time / later_tokens


class Observer(Protocol):
    """Is told on the event loop, so it must be quick. An error in it is logged and changes nothing."""

    def on_stats(self, stats: EngineStats) -> None:
        """The load behind a step; comes once a step, and when the engine falls idle."""

    def on_tokens(self, time_to_first_token: list[float], inter_token_latency: list[float]) -> None:
        """Once a step with tokens, in seconds: requests that had their first one, and time since a sample's last."""

    def on_finished(self, record: FinishedRequest) -> None:
        """A request ended."""
