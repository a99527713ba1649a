// Products of more rows with a weight in blocks: gemm.c, for which blocks.c decodes them.
#pragma once
#include "blocks.h"

// Columns first .. first + count of a row as products read them; `first` is a multiple of 256, count at most 2,048, and up to 63 columns behind them are
// written, too.
void NAME(decode_blocks)(int kind, const uint8_t *row, long first, long count, packed *to);

// As block_linear, which calls it. 1: there is no memory.
int NAME(block_gemm)(const scalar *x, const block_rows *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride,
                     int activation, int wide_output, int threads);
