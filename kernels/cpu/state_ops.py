"""The C library's operations of recurrent layers; each returns None for arguments that C cannot take.

The operations have checked the arguments; this module only rejects calls that C does not support.
"""

from torch import Tensor, get_num_threads

from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.state.state_batch import StateBatch

_MOST_WIDTH = 16  # limit of short_conv.c
_COLUMNS, _MOST_ROWS, _MOST_NUMBERS = 64, 256, 1 << 16  # limits of states.h; slabs have at most 64 columns


def short_conv(
    library: Library, x: Tensor, weight: Tensor, bias: Tensor | None, activates: bool, states: Tensor, batch: StateBatch
) -> Tensor | None:
    """Compute short_conv (kernels/state/short_conv.py)."""
    function = library.short_conv.get(x.dtype)
    channels, width = weight.shape
    if function is None or width > _MOST_WIDTH or not _are_aligned(x, weight, bias, states, batch):
        return None
    y = x.new_empty(x.shape)
    function(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), states.data_ptr(), y.data_ptr(), *_addresses(batch),
        channels, width, x.stride(0), states.stride(0), activates, get_num_threads(),
    )  # fmt: skip
    return y


def gated_delta_rule(
    library: Library,
    qkv: Tensor,
    steps: Tensor,
    decays: Tensor,
    decay_logs: Tensor,
    decay_bias: Tensor,
    key_heads: int,
    states: Tensor,
    batch: StateBatch,
) -> Tensor | None:
    """Compute gated_delta_rule (kernels/state/delta_rule.py)."""
    function = library.gated_delta_rule.get(qkv.dtype)
    _, heads, keys, values = states.shape
    given = (qkv, steps, decays, decay_logs, decay_bias, states)
    if function is None or not _fits_cache(keys, values) or not _are_aligned(*given, batch):
        return None
    out = qkv.new_empty((qkv.shape[0], heads, values))
    function(
        *(x.data_ptr() for x in given), out.data_ptr(), *_addresses(batch), qkv.stride(0), steps.stride(0), decays.stride(0), key_heads, heads,
        keys, values, states.stride(0), decays.shape[1] != heads, get_num_threads(),
    )  # fmt: skip
    return out


def ssd(
    library: Library,
    xbc: Tensor,
    steps: Tensor,
    decay_logs: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    groups: int,
    states: Tensor,
    batch: StateBatch,
) -> Tensor | None:
    """Compute ssd (kernels/state/ssd.py)."""
    function = library.ssd.get(xbc.dtype)
    _, heads, rows, values = states.shape
    given = (xbc, steps, decay_logs, step_bias, skip, states)
    if function is None or not _fits_cache(rows, values) or not _are_aligned(*given, batch):
        return None
    out = xbc.new_empty((xbc.shape[0], heads, values))
    function(
        *(x.data_ptr() for x in given), out.data_ptr(), *_addresses(batch), xbc.stride(0), steps.stride(0), groups, heads, rows, values,
        states.stride(0), get_num_threads(),
    )  # fmt: skip
    return out


def gated_norm(
    library: Library, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool
) -> Tensor | None:
    """Compute gated_norm (kernels/state/gated_norm.py)."""
    function = library.gated_norm.get(x.dtype)
    if function is None or not _are_aligned(x, gate, weight):
        return None
    tokens, groups, size = x.shape
    y = x.new_empty(x.shape)
    function(
        x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr(), tokens, groups, size, gate.stride(0), size if weight.shape[0] > 1 else 0,
        eps, gates_first, get_num_threads(),
    )  # fmt: skip
    return y


def _fits_cache(rows: int, values: int) -> bool:
    """True if C can keep a head's matrix [rows, values] in a core's cache."""
    return rows <= _MOST_ROWS and rows * -(-values // _COLUMNS) * _COLUMNS <= _MOST_NUMBERS


def _are_aligned(*given: Tensor | StateBatch | None) -> bool:
    """True if each tensor starts at a multiple of its numbers' bytes."""
    for x in given:
        if isinstance(x, StateBatch):
            if (x.before.data_ptr() | x.first_runs.data_ptr() | x.ends.data_ptr() | x.after.data_ptr()) & 7:
                return False
        elif x is not None and x.data_ptr() & (x.itemsize - 1):
            return False
    return True


def _addresses(batch: StateBatch) -> tuple[int, int, int, int, int]:
    """Return the addresses of a batch's parts, and its number of sequences."""
    before, first_runs, ends, after, host_ends = batch
    return before.data_ptr(), first_runs.data_ptr(), ends.data_ptr(), after.data_ptr(), len(host_ends)
