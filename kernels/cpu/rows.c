// Rows of a table by number, such as embeddings of tokens and angles of positions.
#include "lanes.h"

#define PIECE_ELEMENTS (1 << 13)

typedef struct {
    const scalar *table;
    const int64_t *numbers;
    scalar *y;
    long rows, size, table_rows, rows_per_piece;
    float scale;
} arguments;

static void look_up(const void *given, long piece) {
    const arguments *a = given;
    const long begin = piece * a->rows_per_piece, end = begin + a->rows_per_piece;
    for (long row = begin; row < end && row < a->rows; row++) {
        const int64_t number = a->numbers[row];
        const int is_there = number >= 0 && number < a->table_rows;
        const scalar *from = a->table + (is_there ? number : 0) * a->size;
        scalar *to = a->y + row * a->size;
        // A number outside the table gives a row of NaN: the caller notices it, and no other row changes.
        const float factor = is_there ? a->scale : NAN;
        if (factor == 1.0f) memcpy(to, from, a->size * sizeof *to);
        else
            for (long i = 0; i < a->size; i++) to[i] = put(get(from[i]) * factor);
    }
}

// table [table_rows][size], numbers [rows] -> y [rows][size], times `scale`.
void NAME(rows_of)(const scalar *table, const int64_t *numbers, scalar *y, long rows, long size, long table_rows, float scale, int threads) {
    const arguments a = {table, numbers, y, rows, size, table_rows, 1 + PIECE_ELEMENTS / (size + 1), scale};
    share(look_up, &a, (rows + a.rows_per_piece - 1) / a.rows_per_piece, threads);
}
