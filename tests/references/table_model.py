"""The table model: a Llama checkpoint whose next-token logits are a table of the last token alone.

Embedding = identity, attention and feed-forward write zeros, lm_head = the table, so any greedy output can be scripted
through the real loading and serving path (stop strings, split UTF-8, EOS lists). A token has one successor: a script
uses each token once, and repeats only as a cycle. Pieces of several bytes (byte_tokenizer.py) spell the rest.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from tests.references.byte_tokenizer import PIECES, SPECIAL_TOKENS, token_bytes, write_tokenizer
from tests.references.tiny_models import write_json, write_safetensors

EOS = SPECIAL_TOKENS["</s>"]
EPSILON = 1e-6


def chain(*tokens: int) -> dict[int, int]:
    """The table in which each token follows the one before; a repetition that would need two successors is refused."""
    table: dict[int, int] = {}
    for token, following in itertools.pairwise(tokens):
        if table.setdefault(token, following) != following:
            raise ValueError(f"token {token} would be followed by {table[token]} and by {following}")
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableModel:
    """What to write.

    Attributes:
      table: per token its successor, or the logits of some candidates (others have 0).
      default: the successor of tokens that the table does not name.
      logit: of a successor that is given alone.
      vocab_size: V of the model.
      tokenizer_size: tokens that have a text, V by default.
      eos: config.json's eos_token_id.
      generation_config: generation_config.json, None for no such file.
      pieces: what the ids after the 256 bytes spell.
      max_position: the model's context.
      poison: a token behind which nothing is a number; its request ends with an error.
    """

    table: dict[int, int | dict[int, float]]
    default: int = EOS
    logit: float = 20.0
    vocab_size: int = 320
    tokenizer_size: int | None = None
    eos: int | list[int] | None = EOS
    generation_config: dict | None = None
    pieces: Sequence[bytes] = PIECES
    max_position: int = 8192
    poison: int | None = None

    def text(self, token_ids: Sequence[int]) -> str:
        """What those tokens spell together, special ones by name."""
        return b"".join(token_bytes(i, self.pieces) for i in token_ids).decode(errors="replace")

    def greedy(self, last: int, count: int) -> list[int]:
        """What follows `last`, EOS or not."""
        output: list[int] = []
        for _ in range(count):
            row = self.table.get(last, self.default)
            last = max(row, key=lambda token: row[token]) if isinstance(row, dict) else row
            output.append(last)
        return output

    def logits(self) -> np.ndarray:
        """f32[V, V]: row i are the logits after token i."""
        out = np.zeros((self.vocab_size, self.vocab_size), np.float32)
        for token in range(self.vocab_size):
            row = self.table.get(token, self.default)
            for candidate, logit in (row if isinstance(row, dict) else {row: self.logit}).items():
                out[token, candidate] = logit
        return out

    def write(self, directory: pathlib.Path) -> pathlib.Path:
        """Writes the checkpoint with its tokenizer; returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.vocab_size,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": EPSILON,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": SPECIAL_TOKENS["<s>"],
            "eos_token_id": self.eos,
            "torch_dtype": "float32",
        }
        write_json(directory / "config.json", config)
        if self.generation_config is not None:
            write_json(directory / "generation_config.json", self.generation_config)
        write_tokenizer(directory, self.tokenizer_size or self.vocab_size, self.pieces)
        write_safetensors(directory / "model.safetensors", self._weights())
        return directory

    def _weights(self) -> dict[str, np.ndarray]:
        d, layer = self.vocab_size, "model.layers.0."
        # The final norm makes 1 / sqrt(1 / V + epsilon) of the one in a unit vector.
        head = self.logits().T * math.sqrt(1 / d + EPSILON)
        shapes = {"q_proj": (16, d), "k_proj": (8, d), "v_proj": (8, d), "o_proj": (d, 16)}
        weights = {f"{layer}self_attn.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
        shapes = {"gate_proj": (8, d), "up_proj": (8, d), "down_proj": (d, 8)}
        weights |= {f"{layer}mlp.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
        norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
        weights |= {f"{name}.weight": np.ones(d, np.float32) for name in norms}
        embedding = np.eye(d, dtype=np.float32)
        if self.poison is not None:
            embedding[self.poison] = np.nan
        return weights | {
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": head.astype(np.float32),
        }
