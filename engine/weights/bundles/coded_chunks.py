"""bf16 values in fewer bytes on disk and in transfers: exponents entropy-coded, other bytes unchanged.

A chunk is one Zstandard frame with a checksum: the exponents of all its values, then signs and mantissas. In trained weights an exponent carries
about 2.6 bits, and Zstandard's Huffman codes come within 2 % of that; the other bytes look random, and the frame contains them unchanged. Knows one
chunk's bytes; does not know its tensor and file.
"""

import torch
import zstandard

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.kernels.matrices.planes import join_planes, split_planes

# Literals only: a table of 64 entries and matches of 7 bytes find no matches in exponents, which have no order. Each block has its own Huffman code
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
    """Encode values [n] bf16, one to CHUNK_VALUES of them, as a chunk."""
    planes: bytes = split_planes(values).numpy().tobytes()
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(planes)


def decode_chunk(chunk: memoryview, into: torch.Tensor) -> None:
    """Decode a chunk into [n] bf16, on the host.

    Raises CheckpointError if it is damaged, or not of n values.
    """
    try:
        # checked before so much memory is allocated
        if zstandard.get_frame_parameters(chunk).content_size != into.nbytes:
            raise CheckpointError(f"it does not hold {len(into)} values")
        planes = zstandard.ZstdDecompressor().decompress(chunk)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"it is damaged ({error})") from None
    join_planes(into, planes)
