// Decodes rows of a weight in 12 bits, a chain of columns at a time and a few rows ahead of the multiplication.
//
// Decoding uses registers and units that multiplication leaves idle. Interleaved with multiply-adds it is nearly free; a separate loop costs 9 % of a
// product with 64 rows and 15 % with 32.
#pragma once
#include <limits.h>

#include "lossless.h"

#define STEPS (GROUP * (long)sizeof(scalar) / 64)  // steps in which one group of each row is decoded; each multiplies one cache line of columns

#define MOST_PARTS 24

typedef struct {
    const uint8_t *codes, *palette;
    escapes escapes;
    long number;
    long escape_column;  // column of the next escape, LONG_MAX after the row's last; kept here because the list of escapes is in no cache
    packed *to;
} coded_row;

// The part of one row in one chain.
typedef struct {
    coded_row *row;
    const uint8_t *codes;
    packed *to;
    long column, depth;
} decoded_part;

typedef struct {
    coded_row *rows;
    long num_rows, next, column, columns;  // the row and the column of the part that is decoded next
    long chain, turn, to_other;            // columns of a chain; offset of the buffer to which it is decoded; offset of the second buffer
    decoded_part first[MOST_PARTS];        // of the first tile: their first group is decoded before the tile starts, the others while it is multiplied
    long num_first;
} decoder;

INLINE long column_of_escape(const coded_row *row) {
    const uint32_t *next = row->escapes.next;
    return next != row->escapes.end && *next < bound_of(row->number, MOST_COLUMNS) ? column_of(*next) : LONG_MAX;
}

INLINE coded_row coded_row_at(const coded *w, long row, packed *to) {
    coded_row r = {.codes = codes_at(w, row, 0), .palette = palette_of(w, row), .number = row, .to = to};
    r.escapes = escapes_at(w, row, 0);
    r.escape_column = column_of_escape(&r);
    return r;
}

// Takes the next `most` parts, or all that are left.
INLINE long take_parts(decoder *d, long most, decoded_part *parts) {
    long n = 0;
    for (; n < most && d->column < d->columns; n++) {
        coded_row *row = d->rows + d->next;
        const long left = d->columns - d->column;
        parts[n] = (decoded_part){row, row->codes, row->to + d->turn, d->column, left < d->chain ? left : d->chain};
        row->codes += d->chain / GROUP * GROUP_BYTES;
        if (++d->next == d->num_rows) d->next = 0, d->column += d->chain, d->turn = d->to_other - d->turn;
    }
    return n;
}

// At each step, decodes a group of one in STEPS parts.
INLINE void decode_step(const decoded_part *parts, long num_parts, long step) {
    const long k = step / STEPS * GROUP;
    for (long i = step % STEPS; i < num_parts; i += STEPS) {
        if (k >= parts[i].depth) continue;
        coded_row *row = parts[i].row;
        const uint8_t *from = parts[i].codes + step / STEPS * GROUP_BYTES;
        packed *to = parts[i].to + k;
        if (__builtin_expect(parts[i].depth - k > HALF_GROUP, 1)) store_group(2, from, load_palette(row->palette), to);
        else store_group(1, from, load_palette(row->palette), to);
        for (const long first = parts[i].column + k; __builtin_expect(row->escape_column < first + GROUP, 0);) {
            packed *at = to + row->escape_column - first;
            *at = with_high_byte(*at, *row->escapes.next++ & 255);
            row->escape_column = column_of_escape(row);
        }
    }
}

// Decodes the groups that `step` steps have left.
INLINE void finish_parts(const decoded_part *parts, long num_parts, long step) {
    const long steps = num_parts ? (parts[0].depth + GROUP - 1) / GROUP * STEPS : 0;
    for (; step < steps; step++) decode_step(parts, num_parts, step);
}

INLINE void begin_decoding(decoder *d, long rows_of_tile) {
    d->num_first = take_parts(d, rows_of_tile < d->num_rows ? rows_of_tile : d->num_rows, d->first);
    if (d->num_rows >= 2 * rows_of_tile) {
        for (long step = 0; step < STEPS; step++) decode_step(d->first, d->num_first, step);
    } else {  // otherwise the first tile would decode a row's next chain before this chain's escapes are written
        finish_parts(d->first, d->num_first, 0);
        d->num_first = 0;
    }
}

// Decodes all rows of the next chain at once: matrix tiles leave no idle units.
INLINE void decode_chain(decoder *d) {
    decoded_part parts[MOST_PARTS];
    for (long done = 0, n; done < d->num_rows && d->column < d->columns; done += n) {
        const long left = d->num_rows - done;
        n = take_parts(d, left < MOST_PARTS ? left : MOST_PARTS, parts);
        finish_parts(parts, n, 0);
    }
}

// Fetches the start of a row's escapes and its palette, and the `starts` of the row `behind` rows later.
INLINE void fetch_coded_rows(const coded *w, long row, long behind) {
    __builtin_prefetch(w->escapes + w->starts[row / PALETTE_ROWS]);
    __builtin_prefetch(palette_of(w, row));
    __builtin_prefetch(w->starts + (row + behind) / PALETTE_ROWS);
}
