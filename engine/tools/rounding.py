"""Rounds matrices to codes of four or eight bits, in the format of compressed-tensors.

Each group of columns uses the scale with the least error. Pure functions of tensors; independent of checkpoints.
"""

import torch

# Tried scales by bits: the largest code represents this share of a group's largest value. With four bits, clipping large values often reduces the
# error of other values by more.
_SHARES = {4: tuple(1 - i / 50 for i in range(16)), 8: (1.0,)}
_COMPENSATED = 128  # number of columns whose errors are corrected in later columns at once
_CHUNK = 1 << 22  # number of values for which scales are chosen at once


def choose_scales(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tried scale with the least squared error for each group.

    weight [rows, columns] -> scales [rows, columns / group]
    """
    step = max(1, _CHUNK // weight.shape[1])
    return torch.cat([_scales(part.float(), bits, group, dtype) for part in torch.split(weight, step)])


def round_to_codes(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix to codes.

    weight [rows, columns], scales [rows, groups] -> int8 [rows, columns], from -2^(bits - 1) to 2^(bits - 1) - 1
    """
    most = 1 << (bits - 1)
    groups = torch.unflatten(weight.float(), 1, (scales.shape[1], -1))
    codes: torch.Tensor = (
        (groups / scales.float().unsqueeze(-1)).round().clamp(-most, most - 1).to(torch.int8).flatten(1)
    )
    return codes


def compensate(
    weight: torch.Tensor, sums: torch.Tensor, bits: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round column after column, and correct the later columns for the error of each (GPTQ).

    The products with the observed inputs then change least (Frantar et al., arXiv 2210.17323, algorithm 1). weight [rows, columns], sums of x^T x
    [columns, columns] -> codes and scales, as `round_to_codes` and `choose_scales` return them.
    """
    left, most = weight.float().clone(), 1 << (bits - 1)
    columns = left.shape[1]
    inverse = _inverse_factor(sums)
    codes = torch.empty(left.shape, dtype=torch.int8)
    scales = torch.empty(len(left), columns // group, dtype=dtype)
    # The step is a multiple of the group, because a group's scale is chosen after its values are corrected for the errors of earlier columns.
    step = max(group, _COMPENSATED // group * group)
    for begin in range(0, columns, step):
        end = min(begin + step, columns)
        errors = torch.empty(len(left), end - begin)
        for i in range(begin, end):
            if i % group == 0:
                scales[:, i // group] = choose_scales(left[:, i : i + group], bits, group, dtype)[:, 0]
            scale = scales[:, i // group].float()
            rounded = (left[:, i] / scale).round().clamp(-most, most - 1)
            codes[:, i] = rounded.to(torch.int8)
            error = errors[:, i - begin] = (left[:, i] - rounded * scale) / inverse[i, i]
            left[:, i:end] -= torch.outer(error, inverse[i, i:end])
        left[:, end:] -= errors @ inverse[begin:end, end:]
    return codes, scales


def _inverse_factor(sums: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped sums.

    The damping adds a hundredth of the diagonal's mean to the diagonal, because some inputs may be zero in the whole text.
    """
    damped = sums.double()
    damped = damped + torch.eye(len(damped), dtype=damped.dtype) * max(1e-2 * damped.diagonal().mean().item(), 1e-12)
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor.float()


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into words. int8 [rows, columns] -> int32 [rows, words]

    Half of the range is added to each code, to make it unsigned; the first code is in a word's lowest bits.
    """
    offset = (codes.int() + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        offset = torch.nn.functional.pad(offset, (0, -offset.shape[1] % 8))
        offset = offset[:, ::2] | offset[:, 1::2] << 4
    else:
        offset = torch.nn.functional.pad(offset, (0, -offset.shape[1] % 4))
    return offset.contiguous().view(torch.int32)


def _scales(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    groups = torch.unflatten(weight, 1, (-1, group))
    most = 1 << (bits - 1)
    widest = groups.abs().amax(-1) / (most - 0.5)
    best, least = torch.ones_like(widest, dtype=dtype), torch.full_like(widest, torch.inf)
    for share in _SHARES[bits]:
        scales = (widest * share).to(dtype)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # for groups of zeros
        wide = scales.float().unsqueeze(-1)
        error = ((groups / wide).round().clamp(-most, most - 1) * wide - groups).square().sum(-1)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best
