// Packs rows so that a vector holds one number of each row. Products of whole vectors of rows then need no sums across lanes.
#pragma once
#include "lanes.h"

#define SQUARE (LANES * PER_LANE)  // columns that are packed at a time

INLINE long whole_squares(long columns) { return (columns + SQUARE - 1) / SQUARE * SQUARE; }

// to[i][lane] = rows[lane][i * PER_LANE ..]. Lines are `line` apart; columns after the last are zero, up to a whole square.
INLINE void pack(const scalar *const *rows, long columns, packed *to, long line) {
    long k = 0;
    for (; k + SQUARE <= columns; k += SQUARE) pack_square(rows, k, to + k / PER_LANE * line, line);
    if (k == columns) return;
    scalar padded[LANES][SQUARE];
    const scalar *ends[LANES];
    memset(padded, 0, sizeof padded);
    for (long lane = 0; lane < LANES; lane++) {
        memcpy(padded[lane], rows[lane] + k, (columns - k) * sizeof(scalar));
        ends[lane] = padded[lane];
    }
    pack_square(ends, 0, to + k / PER_LANE * line, line);
}

// to[i] = row[i], and zeros after the last column up to `line`.
INLINE void copy_packed(const scalar *row, long columns, long line, packed *to) {
    long i = 0;
#if PER_LANE == 2
    for (; i + SQUARE <= columns; i += SQUARE) memcpy(to + i, row + i, SQUARE * sizeof *to);
#else
    for (; i + LANES <= columns; i += LANES) store_f32(to + i, load(row + i));
#endif
    for (; i < columns; i++) to[i] = to_packed(row[i]);
    for (; i < line; i++) to[i] = 0;
}
