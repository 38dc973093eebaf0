"""EngineConfig: every option of one engine, checked when it is made. Names are vLLM's where vLLM has one."""

import dataclasses

from octavo.configs.errors import ConfigError
from octavo.configs.fields import check_types
from octavo.configs.scheduler import POLICIES

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
BLOCK_SIZES = (8, 16, 32, 64, 128)
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of `Engine(model, **options)`.

    Attributes:
      model: a directory, a .gguf file or a Hugging Face hub id.
      tokenizer: another directory or hub id for the tokenizer; the model's own by default.
      revision: branch, tag or commit on the hub.
      load_format: auto, safetensors, gguf, or dummy (seeded random weights from the config alone).
      dtype: of weights and activations; auto is bfloat16 on accelerators and float32 on CPU.
      kv_cache_dtype: of keys and values; auto is that of the activations, fp8 (the same as fp8_e4m3)
        halves a 16-bit cache and keeps three bits of mantissa.
      seed: of dummy weights and of requests that bring no seed.
      max_model_len: tokens of prompt and output; by default what the model allows,
        on CPU at most 4096.
      max_num_seqs: rows that run at once; by default 256, on CPU 16.
      max_num_batched_tokens: token budget of a step; by default 2048, on CPU 512.
      block_size: tokens in one KV block.
      gpu_memory_utilization: part of the device's memory for weights, cache and
        temporaries; on CPU, of the host's, and the cache takes at most what all rows can fill.
      num_gpu_blocks_override: KV blocks, instead of what memory allows.
      enable_prefix_caching: reuse the blocks of equal prefixes.
      enable_chunked_prefill: cut prompts that exceed the budget; without it the budget is max_model_len.
      scheduling_policy: fcfs or priority.
      max_logprobs: the most top log-probabilities that a request may ask for.
      max_constrained_rows: requests with penalties or allowed ids that run at once; by default max_num_seqs.
      async_scheduling: dispatch a step before the last one's tokens are known.
      attention_backend: auto, or the name of an implementation.
      sampling_backend: auto or reference (jnp), or mosaic_gpu on Hopper.
      decode_rungs, token_rungs: row counts of decode-only programs and token counts
        of mixed ones; chosen for the device by default.
      generation_config: auto takes the model's sampling defaults, vllm ignores them.
      override_generation_config: sampling defaults that replace the model's.
      warmup: full compiles every program before serving, progressive the coarse ones.
      compilation_cache_dir: of compiled programs; a folder of the user's cache by default,
        an empty string for none.
      hf_overrides: replaces entries of the model's config.json.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    max_logprobs: int = 20
    max_constrained_rows: int | None = None
    async_scheduling: bool = True
    attention_backend: str = "auto"
    sampling_backend: str = "auto"
    decode_rungs: tuple[int, ...] | None = None
    token_rungs: tuple[int, ...] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, object] = dataclasses.field(default_factory=dict)
    warmup: str = "progressive"
    compilation_cache_dir: str | None = None
    hf_overrides: dict[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        _one_of("generation_config", self.generation_config, ("auto", "vllm"))
        _one_of("warmup", self.warmup, ("progressive", "full"))
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_constrained_rows"):
            _positive(name, getattr(self, name))
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                "num_gpu_blocks_override must be at least 2 (one block stays empty), "
                f"got {self.num_gpu_blocks_override}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.max_logprobs <= 64:
            raise ConfigError(f"max_logprobs must be between 0 and 64, got {self.max_logprobs}")
        for name in ("decode_rungs", "token_rungs"):
            rungs = getattr(self, name)
            if rungs is not None and (not rungs or any(r < 1 for r in rungs) or list(rungs) != sorted(set(rungs))):
                raise ConfigError(f"{name} must be increasing positive numbers, got {rungs}")

    def resolve(self, platform: str, model_max_len: int) -> "ResolvedConfig":
        """Fills in what depends on the device (`cpu`, `gpu`, `tpu`) and on the model."""
        cpu = platform == "cpu"
        if self.max_model_len is not None and self.max_model_len > model_max_len:
            raise ConfigError(f"max_model_len {self.max_model_len} is above the model's own limit of {model_max_len}")
        max_len = self.max_model_len or (min(model_max_len, 4096) if cpu else model_max_len)
        max_seqs = self.max_num_seqs or (16 if cpu else 256)
        budget = self.max_num_batched_tokens or max(512 if cpu else 2048, max_seqs + 1)
        if not self.enable_chunked_prefill:
            if self.max_num_batched_tokens is not None and budget < max_len:
                raise ConfigError(
                    f"without enable_chunked_prefill, max_num_batched_tokens ({budget}) must be at least "
                    f"max_model_len ({max_len})"
                )
            budget = max(budget, max_len)
        if budget <= max_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be above max_num_seqs ({max_seqs}), "
                "or a full batch leaves no room for a prompt"
            )
        if self.decode_rungs is not None and self.decode_rungs[-1] != max_seqs:
            raise ConfigError(f"the last of decode_rungs {self.decode_rungs} must be max_num_seqs ({max_seqs})")
        if self.token_rungs is not None and (self.token_rungs[-1] != budget or self.token_rungs[0] <= max_seqs):
            raise ConfigError(
                f"token_rungs {self.token_rungs} must start above max_num_seqs ({max_seqs}) "
                f"and end at max_num_batched_tokens ({budget})"
            )
        if not cpu and self.token_rungs is not None and any(rung % 8 for rung in self.token_rungs):
            raise ConfigError(f"token_rungs {self.token_rungs} must be multiples of 8 on a {platform}")
        dtype = ("float32" if cpu else "bfloat16") if self.dtype == "auto" else self.dtype
        return ResolvedConfig(
            platform=platform,
            dtype=dtype,
            kv_dtype=dtype if self.kv_cache_dtype == "auto" else "float8_e4m3fn",
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_constrained_rows=min(self.max_constrained_rows or max_seqs, max_seqs),
            decode_rungs=self.decode_rungs or default_decode_rungs(max_seqs, platform),
            token_rungs=self.token_rungs or default_token_rungs(max_seqs, budget, platform),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The options that were open until device and model were known."""

    platform: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_constrained_rows: int
    decode_rungs: tuple[int, ...]
    token_rungs: tuple[int, ...]


def default_decode_rungs(max_seqs: int, platform: str) -> tuple[int, ...]:
    """Row counts of decode-only programs: padding stays below 25 % above 16 rows, except on CPU (few programs)."""
    if platform == "cpu":
        rungs = [r for r in (1, 4, 16, 64, 256) if r < max_seqs]
    else:
        rungs, rung = [], 1
        while rung < max_seqs * 0.95:
            rungs.append(rung)
            rung = rung * 2 if rung < 16 else rung + max(4, rung // 16 * 4)
    return (*rungs, max_seqs)


def default_token_rungs(max_seqs: int, budget: int, platform: str) -> tuple[int, ...]:
    """Token counts of mixed programs: each holds a full batch of decode rows and some prompt."""
    steps = (4,) if platform == "cpu" else (8, 4, 2)
    smallest = max_seqs + 1
    rungs = sorted({max(smallest, budget // step) for step in steps} | {budget})
    if platform == "cpu":
        return tuple(r if r == budget else min(-(-r // 16) * 16, budget) for r in rungs)
    return tuple(dict.fromkeys(-(-r // 16) * 16 for r in rungs))  # kernels want multiples of 8


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be a positive number, got {value}")
