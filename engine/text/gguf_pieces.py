"""SentencePiece tokenizers of GGUF files (kind `llama`): pieces with scores, and bytes for what no piece spells.

Merging pairs by the score of what they make, best first and leftmost among equals, is BPE whose merges are all the
ways to make a piece from two others, ranked by its score (as Kudo and Richardson, arXiv:1808.06226, train it).
Refuses vocabularies without usable scores or byte tokens, and pieces too long to cut.
"""

import math
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.configs.errors import LoadError

SPACE = "▁"  # stands for a space in pieces
MAX_PIECE = 256  # characters; cutting a piece everywhere takes quadratic time


def piece_pipeline(
    vocab: dict[str, int], mergeable: Sequence[str], scores: Sequence[float], unknown: str, space_prefix: bool
) -> tokenizers.Tokenizer:
    """Builds the pipeline.

    Args:
      vocab: id by token, control and byte tokens too.
      mergeable: the tokens that text may come out as.
      scores: by id; the higher, the earlier a piece is made.
      unknown: the token for bytes that have none.
      space_prefix: text gets a space in front, as if it were inside of a sentence.

    Raises:
      LoadError: see above.
    """
    if any(not math.isfinite(score) for score in scores):
        raise LoadError("tokenizer.ggml.scores must be finite numbers")
    if missing := [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in vocab]:
        raise LoadError(f"the GGUF tokenizer lacks {len(missing)} byte tokens, the first is {missing[0]}")
    model = models.BPE(
        vocab=vocab,
        merges=_merges({piece: vocab[piece] for piece in mergeable}, scores),
        byte_fallback=True,
        unk_token=unknown,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    to_text: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        to_pieces.insert(0, normalizers.Prepend(SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_pieces)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _merges(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best first."""
    merges = []
    for piece, piece_id in ids.items():
        if len(piece) > MAX_PIECE:
            raise LoadError(
                f"tokenizer.ggml.tokens: token {piece_id} has {len(piece)} characters, more than {MAX_PIECE}"
            )
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [(left, right) for left, right in pairs if left in ids and right in ids]
        found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(-scores[piece_id], pair) for pair in found]
    merges.sort(key=lambda entry: entry[0])  # stable: pieces of one score in the order of the vocabulary
    return [pair for _, pair in merges]
