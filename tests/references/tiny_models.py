"""Tiny random models, one for each configuration that Octavo supports: listed once, written as checkpoints.

Needs numpy only, so that the script that makes the goldens (Python 3.11, torch) and the tests
(Python 3.12, jax) build the same weights. Refuses to know any framework.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib

import numpy as np

from tests.references.byte_tokenizer import SPECIAL_TOKENS, write_tokenizer

VOCAB_SIZE = 320
OUTPUT_LENGTH = 24  # greedy tokens in a golden
TOP = 5  # log-probabilities kept at each position
INIT = 0.1  # standard deviation of weights: with the usual 0.02 logits hardly depend on attention
MAX_POSITION = 512

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": INIT,
    "bos_token_id": SPECIAL_TOKENS["<s>"],
    "eos_token_id": SPECIAL_TOKENS["</s>"],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_DROP = object()  # removes a key of the base


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """One checkpoint.

    Attributes:
      name: unique; also the seed of the weights and of the prompt.
      config: config.json.
      generation_config: generation_config.json, None for no such file.
      prompt_length: tokens of the golden's prompt.
      stored: dtype in the file, F32, F16 or BF16. Every weight is a bfloat16 number, so all hold the same values
        (F16 within 2**-25).
      shards: number of safetensors files; above one there is an index.
    """

    name: str
    config: dict
    generation_config: dict | None = None
    prompt_length: int = 40
    stored: str = "F32"
    shards: int = 1

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.config.get("num_key_value_heads") or self.config["num_attention_heads"]

    @property
    def golden(self) -> pathlib.Path:
        """The committed reference output."""
        return pathlib.Path(__file__).parents[1] / "goldens" / "tiny" / f"{self.name}.npz"


def _llama(name: str, changes: dict | None = None, **fields: object) -> TinyModel:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
    return _model(name, config, changes, fields)


def _mistral(name: str, changes: dict | None = None, **fields: object) -> TinyModel:
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    return _model(name, config, changes, fields)


def _qwen3(name: str, changes: dict | None = None, **fields: object) -> TinyModel:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 32}
    config |= {"rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
    return _model(name, config, changes, fields)


def _model(name: str, config: dict, changes: dict | None, fields: dict) -> TinyModel:
    merged = _BASE | config | (changes or {})
    return TinyModel(name, {key: value for key, value in merged.items() if value is not _DROP}, **fields)


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

MODELS: tuple[TinyModel, ...] = (
    _llama("llama-gqa"),
    _llama("llama-mha", {"num_key_value_heads": _DROP, "rope_theta": _DROP, "torch_dtype": "float16"}, stored="F16"),
    _llama("llama-mqa", {"num_key_value_heads": 1}),
    _llama("llama-tied", {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}, stored="BF16"),
    _llama("llama-biases", {"attention_bias": True, "mlp_bias": True}),
    _llama("llama-head-dim", {"head_dim": 24}),
    _llama("llama-head-64", {"head_dim": 64}, prompt_length=140),  # sizes that the GPU kernels take
    _llama("llama-sharded", shards=3, prompt_length=43),
    _llama("llama-eos-list", {"eos_token_id": [2, 7]}, generation_config={"eos_token_id": [2, 11, 13]}),
    _llama("llama-linear-old", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    _llama(
        "llama-linear-new",
        {"rope_theta": _DROP, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20000.0}},
    ),
    _llama(
        "llama-llama3-old",
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"} | _LLAMA3},
        prompt_length=150,
    ),
    _llama(
        "llama-llama3-new",
        {"rope_theta": _DROP, "rope_parameters": {"rope_type": "llama3", "rope_theta": 20000.0} | _LLAMA3},
        prompt_length=147,
    ),
    _llama("llama-yarn-old", {"rope_scaling": {"type": "yarn"} | _YARN}, prompt_length=150),
    _llama(
        "llama-yarn-mscale",
        {
            "rope_theta": _DROP,
            "rope_parameters": _YARN
            | {"rope_type": "yarn", "rope_theta": 5000.0, "mscale": 0.8, "mscale_all_dim": 0.4, "truncate": False},
        },
        prompt_length=150,
    ),
    _llama(
        "llama-yarn-attention-factor",
        {
            "rope_theta": _DROP,
            "rope_parameters": _YARN
            | {"rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
        },
        prompt_length=149,
    ),
    _llama("llama-yarn-no-original", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, prompt_length=150),
    _mistral("mistral", {"rope_theta": 1e6}, stored="F16", prompt_length=39),
    _mistral("mistral-new", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    _qwen3("qwen3"),
    _qwen3("qwen3-tied", {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}, stored="BF16"),
    _qwen3("qwen3-head-128", {"head_dim": 128, "num_attention_heads": 8}, prompt_length=130),
    _qwen3("qwen3-bias", {"attention_bias": True, "head_dim": 16}),
    _qwen3("qwen3-yarn", {"rope_scaling": {"rope_type": "yarn"} | _YARN}, prompt_length=149),
)
BY_NAME = {model.name: model for model in MODELS}


def make_prompt(model: TinyModel) -> list[int]:
    """The golden's prompt: seeded ids above the special tokens."""
    low = len(SPECIAL_TOKENS)
    raw = _philox(f"{model.name}/prompt").random_raw(model.prompt_length)
    return [low + int(x % (VOCAB_SIZE - low)) for x in raw]


def weight_shapes(model: TinyModel) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint of such a model holds, by its Hugging Face name."""
    config, head_dim = model.config, model.head_dim
    d, f, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * head_dim, model.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        for name, shape in linears.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        for name, shape in {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}.items():
            shapes[f"{prefix}mlp.{name}.weight"] = shape
            if config.get("mlp_bias"):
                shapes[f"{prefix}mlp.{name}.bias"] = shape[:1]
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (d,)
    return shapes


@functools.cache
def make_weights(model_name: str) -> dict[str, np.ndarray]:
    """The weights of a listed model in float32; norms and biases are random too, so that they matter."""
    return {
        name: _round_to_bfloat16(_noise(f"{model_name}/{name}", shape) * _scale(name) + _is_norm(name))
        for name, shape in weight_shapes(BY_NAME[model_name]).items()
    }


def _is_norm(name: str) -> bool:
    return "norm.weight" in name


def _scale(name: str) -> float:
    """Embedding and head are smaller: half the logits' spread halves what bfloat16 loses of them."""
    if _is_norm(name):
        return 0.2
    return 0.07 if "lm_head" in name or "embed_tokens" in name else INIT


def _philox(key: str) -> np.random.Philox:
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Philox(key=np.frombuffer(digest[:16], "<u8").astype(np.uint64))


def _noise(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal numbers, equal on every machine: only raw Philox bits, integer sums and one rounding."""
    raw = _philox(key).random_raw(int(np.prod(shape)))
    parts = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    return ((parts - 2 * 0xFFFF) / 0xFFFF * np.sqrt(3.0)).astype(np.float32).reshape(shape)


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def write_checkpoint(model: TinyModel, directory: pathlib.Path, weights: dict[str, np.ndarray] | None = None) -> None:
    """Writes a directory as Hugging Face lays it out: configs, weights, a byte-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", model.config)
    if model.generation_config is not None:
        write_json(directory / "generation_config.json", model.generation_config)
    write_tokenizer(directory, model.config["vocab_size"])
    weights = make_weights(model.name) if weights is None else weights
    names = sorted(weights)
    if model.shards == 1:
        write_safetensors(directory / "model.safetensors", weights, model.stored)
        return
    weight_map = {}
    for shard in range(model.shards):
        file = f"model-{shard + 1:05}-of-{model.shards:05}.safetensors"
        part = names[shard :: model.shards]
        write_safetensors(directory / file, {name: weights[name] for name in part}, model.stored)
        weight_map |= dict.fromkeys(part, file)
    size = sum(x.size for x in weights.values()) * (4 if model.stored == "F32" else 2)
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_safetensors(path: pathlib.Path, weights: dict[str, np.ndarray], stored: str = "F32") -> None:
    """Writes float32 arrays as F32, F16 or BF16, by hand: numpy has no bfloat16, so the upper halves are taken."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, value in weights.items():
        if stored == "BF16":
            data = (_round_to_bfloat16(value).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            data = value.astype({"F32": "<f4", "F16": "<f2"}[stored]).tobytes()
        header[name] = {"dtype": stored, "shape": value.shape, "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
