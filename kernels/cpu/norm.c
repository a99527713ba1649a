// Root-mean-square normalisation of rows, alone or after the addition of a residual. Statistics and products are fp32, whatever the storage type.
#include "rms.h"

#define PIECE_ELEMENTS (1 << 13)

typedef struct {
    const scalar *x, *added;
    const void *weight;
    scalar *y, *sums;
    long rows, size, rows_per_piece;
    int wide_weight;
    float eps;
} arguments;

static void add(const scalar *a, const scalar *b, scalar *sum, long size) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) store(sum + i, load(a + i) + load(b + i));
    for (; i < size; i++) sum[i] = put(get(a[i]) + get(b[i]));
}

static void normalise_rows(const void *given, long piece) {
    const arguments *a = given;
    const long begin = piece * a->rows_per_piece, end = begin + a->rows_per_piece;
    for (long row = begin; row < end && row < a->rows; row++) {
        const long at = row * a->size;
        if (a->added) add(a->x + at, a->added + at, a->sums + at, a->size);
        normalise((a->added ? a->sums : a->x) + at, a->weight, a->wide_weight, a->eps, a->y + at, a->size);
    }
}

// added: rows that are added to x first, or NULL. Their sums are rounded to the storage type and written to `sums`.
void NAME(rms_norm)(const scalar *x, const scalar *added, const void *weight, scalar *y, scalar *sums, long rows, long size, int wide_weight,
                    float eps, int threads) {
    const arguments a = {x, added, weight, y, sums, rows, size, 1 + PIECE_ELEMENTS / (size + 1), wide_weight, eps};
    share(normalise_rows, &a, (rows + a.rows_per_piece - 1) / a.rows_per_piece, threads);
}
