"""Prometheus metrics under vLLM's names with the prefix `octavo:`, in a registry of their own.

Label values come from fixed sets: the served model, finish reasons, route templates, methods, status classes.
Counters follow the engine's, and what would make one smaller is dropped. Everything is called on the event loop.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.configs.engine import EngineConfig
from octavo.engine.observer import FinishedRequest
from octavo.engine.request import FinishReason
from octavo.engine.stats import EngineFacts, EngineStats
from octavo.server.stats_log import StatsLog

PREFIX = "octavo:"
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
EACH_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")


class Metrics:
    """All of the server's metrics; the engine's client calls it as its observer."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._model = model_name
        self.stats_log = StatsLog()
        self.http = HttpMetrics(self._registry)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

        self._gauges = {
            "running": self._gauge("num_requests_running", "Samples that the engine runs."),
            "waiting": self._gauge("num_requests_waiting", "Samples that wait for the engine."),
            "kv_usage": self._gauge("kv_cache_usage_perc", "The used part of the KV cache; 1 is full."),
        }
        self._counters = {
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens of admitted samples."),
            "generation_tokens": self._counter("generation_tokens", "Tokens generated."),
            "prefix_queries": self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            "prefix_hits": self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "preemptions": self._counter("num_preemptions", "Samples that had to give up their blocks."),
        }
        success = Counter(
            PREFIX + "request_success",
            "Samples that ended, by the reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._success = {reason.value: success.labels(model_name, reason.value) for reason in FinishReason}
        self._last = EngineStats()
        self._make_histograms()

    def _make_histograms(self) -> None:
        lengths = length_buckets(1 << 20)
        make = self._histogram
        self._first_token = make("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self._inter_token = TokenHistogram(
            self._registry, "inter_token_latency_seconds", "Between two tokens of a sample.", self._model, EACH_TOKEN
        )
        self._per_token = make(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", EACH_TOKEN
        )
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the end of a request.", LATENCY)
        self._queue = make("request_queue_time_seconds", "From arrival to the first step that ran it.", LATENCY)
        self._prefill = make("request_prefill_time_seconds", "From there to the first token.", LATENCY)
        self._decode = make("request_decode_time_seconds", "From the first token to the last.", LATENCY)
        self._inference = make("request_inference_time_seconds", "From the first step to the last token.", LATENCY)
        self._prompt_length = make("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_length = make("request_generation_tokens", "Tokens generated for a request.", lengths)
        self._n = make("request_params_n", "The parameter n.", SAMPLES)
        self._max_tokens = make("request_params_max_tokens", "The parameter max_tokens.", lengths)
        self._iteration = make("iteration_tokens_total", "Prompt and output tokens of a step.", ITERATION_TOKENS)

    def describe(self, config: EngineConfig, facts: EngineFacts) -> None:
        """Adds cache_config_info, whose labels say how the cache was set up. Called once, when the engine is ready."""
        labels = {
            "model_name": self._model,
            "block_size": facts.block_size,
            "num_gpu_blocks": facts.num_blocks,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "cache_dtype": facts.kv_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        info = Gauge(
            PREFIX + "cache_config_info", "How the KV cache is set up.", tuple(labels), registry=self._registry
        )
        info.labels(*map(str, labels.values())).set(1)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: the plain text format, which every scraper takes, whatever it asks for.

        (prometheus_client's OpenMetrics writes the colon in a sample's name as an underscore.)
        """
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    # The engine's client calls these.

    def on_stats(self, stats: EngineStats) -> None:
        last, self._last = self._last, stats
        self.stats_log.observe(stats)
        for name, gauge in self._gauges.items():
            if (now := getattr(stats, name)) != getattr(last, name):
                gauge.set(now)
        for name, counter in self._counters.items():
            grown = getattr(stats, name) - getattr(last, name)
            if grown > 0:
                counter.inc(grown)
        tokens = stats.prompt_tokens + stats.generation_tokens - last.prompt_tokens - last.generation_tokens
        if tokens > 0:
            self._iteration.observe(tokens)

    def on_tokens(self, time_to_first_token: list[float], inter_token_latency: list[float]) -> None:
        for seconds in time_to_first_token:
            self._first_token.observe(seconds)
        self._inter_token.observe_all(inter_token_latency)

    def on_finished(self, record: FinishedRequest) -> None:
        for reason in record.finish_reasons:
            self._success[reason].inc()
        self._e2e.observe(record.e2e_time)
        for histogram, value in (
            (self._queue, record.queue_time),
            (self._prefill, record.prefill_time),
            (self._decode, record.decode_time),
            (self._inference, record.inference_time),
            (self._per_token, record.time_per_output_token),
        ):
            if value is not None:
                histogram.observe(max(value, 0.0))
        self._prompt_length.observe(record.num_prompt_tokens)
        self._output_length.observe(record.num_generation_tokens)
        self._n.observe(record.n)
        self._max_tokens.observe(record.max_tokens)

    # Below: how metrics are made.

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)


class TokenHistogram(Collector):
    """A histogram of what is observed for every token: prometheus_client's own takes two locks and a loop each time."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, model_name: str, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._model = PREFIX + name, text, model_name
        self._bounds = (*map(float, buckets), math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        below = zip(map(floatToGoString, self._bounds), itertools.accumulate(self._counts), strict=True)
        family.add_metric((self._model,), list(below), self._sum)
        yield family


class HttpMetrics:
    """Requests by route template, method and class of status; what comes in is a template already, never a path."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            PREFIX + "http_requests",
            "Requests that were answered, or whose client went away (4xx).",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            PREFIX + "http_request_duration_seconds",
            "From the headers of a request to the end of its answer.",
            ("handler", "method"),
            registry=registry,
            buckets=LATENCY,
        )

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """One request is over.

        Args:
          handler: the template of its route.
          method: one of a fixed set.
          status: the number of HTTP.
          seconds: it took.
        """
        index = min(max(status // 100, 1), len(STATUS_CLASSES)) - 1
        self._requests.labels(handler, method, STATUS_CLASSES[index]).inc()
        self._seconds.labels(handler, method).observe(max(seconds, 0.0))


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to `longest`."""
    steps = (step * 10**power for power in range(10) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= longest)
