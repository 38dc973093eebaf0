"""What `tune` may choose about the Hopper kernels: speed depends on it, and the order of sums; nothing else does."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Sizes that the kernels take as arguments. The defaults are those of an H200, found by hand.

    Attributes:
      decode_tile: tokens of KV in one tile of a decode row, a multiple of 64; None for what was fastest that fits.
      decode_stages: tiles whose copies are in flight in each half of a block; None for what fits.
      prefill_tile: tokens of KV in one tile of a prefill row, 64 or 128; None for what fits.
      prefill_stages: tiles whose copies are in flight; None for what fits.
      blocks_per_core: persistent blocks for each multiprocessor.
      longest, shortest: tokens of a piece of a decode row, see `worklist.Workers`.
      combine_at_once: pieces whose results one block loads together.
      combine_blocks: blocks that combine, for each block that decodes.
    """

    decode_tile: int | None = None
    decode_stages: int | None = None
    prefill_tile: int | None = None
    prefill_stages: int | None = None
    blocks_per_core: int = 1
    longest: int = 4096
    shortest: int = 128
    combine_at_once: int = 16
    combine_blocks: int = 8

    def decode_tile_for(self, head_size: int, narrow: bool) -> int:
        """Tokens of a decode tile; `narrow`: the cache is fp8. Two tiles of 128 do not fit with a head of 256."""
        return self.decode_tile or (128 if narrow and head_size <= 128 else 64)


DEFAULT = Parameters()
