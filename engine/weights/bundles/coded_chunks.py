"""A compressed form of bf16 values for disks and transfers, in which exponents are entropy-coded.

A chunk is one Zstandard frame with a checksum: the exponents of all its values, then signs and mantissas. In trained weights an exponent carries
about 2.6 bits, and Zstandard's Huffman codes come within 2 % of that. Signs and mantissas look random, and the frame contains them unchanged. This
module knows the bytes of one chunk, and is independent of its tensor and file.
"""

import torch
import zstandard

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.kernels.matrices.planes import join_planes, split_planes

# Parameters with which Zstandard hardly searches for repetitions: exponents are in random order, so a run of 7 bytes hardly ever occurs again. The
# window limits the length of blocks, each of which has its own Huffman code.
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
    """Encode [n] bf16 as a chunk; n is 1 to CHUNK_VALUES."""
    planes: bytes = split_planes(values).numpy().tobytes()
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(planes)


def decode_chunk(chunk: memoryview, into: torch.Tensor) -> None:
    """Decode a chunk into `into`, [n] bf16 on the host.

    Raises CheckpointError if the chunk is damaged, or does not contain n values.
    """
    try:
        # The size is checked first, because decompression allocates as much memory as the frame's header asks for.
        if zstandard.get_frame_parameters(chunk).content_size != into.nbytes:
            raise CheckpointError(f"it does not hold {len(into)} values")
        planes = zstandard.ZstdDecompressor().decompress(chunk)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"it is damaged ({error})") from None
    join_planes(into, planes)
