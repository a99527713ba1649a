"""bf16 values in fewer bytes on disk and on the wire: of each chunk the exponents entropy-coded, signs and mantissas as they are.

A chunk is one Zstandard frame with a checksum: the exponents of all its values, then their other bytes. Of trained weights an exponent carries 2.6
bits or so, and Zstandard's Huffman codes come within 2 % of that; the other bytes look random, and the frame has them unchanged. Knows one chunk's
bytes; refuses to know which tensor and which file they are of.
"""

import torch
import zstandard

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.kernels.matrices.planes import join_planes, split_planes

# Literals alone: a table of 64 entries and matches of 7 bytes find none in exponents, which have no order. Each block has a Huffman code of its own
# and is no longer than the window.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    strategy=zstandard.STRATEGY_FAST,
    write_checksum=True,
    write_content_size=True,
)


def encode_chunk(values: torch.Tensor) -> bytes:
    """values [n] bf16, one to CHUNK_VALUES of them -> the chunk."""
    planes: bytes = split_planes(values).numpy().tobytes()
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(planes)


def decode_chunk(chunk: memoryview, into: torch.Tensor) -> None:
    """Fill into [n] bf16, on the host. Raises CheckpointError for a chunk that is damaged, or not of n values."""
    try:
        if zstandard.get_frame_parameters(chunk).content_size != into.nbytes:  # before so much memory is taken
            raise CheckpointError(f"it does not hold {len(into)} values")
        planes = zstandard.ZstdDecompressor().decompress(chunk)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"it is damaged ({error})") from None
    join_planes(into, planes)
