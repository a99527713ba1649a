// The norm and the gate of a recurrent layer's output, in either order. All numbers are computed in fp32, whatever the storage type.
#include "activation.h"

#define PIECE_ELEMENTS (1 << 12)

typedef struct {
    const scalar *x, *gate, *weight;
    scalar *y;
    long rows, groups, size, gate_stride, weight_stride, rows_per_piece;
    float eps;
    int gates_first;
} arguments;

INLINE lanes part_or_all(const scalar *p, long left) { return left < LANES ? load_part(p, left) : load(p); }

INLINE lanes opened(const arguments *a, const scalar *x, const scalar *gate, long left) {
    return part_or_all(x, left) * (a->gates_first ? activate(1, part_or_all(gate, left)) : all(1.0f));
}

static void normalise_rows(const void *given, long piece) {
    const arguments *a = given;
    const long begin = piece * a->rows_per_piece, end = begin + a->rows_per_piece;
    for (long row = begin; row < end && row < a->rows; row++) {
        const long group = row % a->groups;
        const scalar *x = a->x + row * a->size, *gate = a->gate + row / a->groups * a->gate_stride + group * a->size;
        const scalar *weight = a->weight + group * a->weight_stride;
        scalar *y = a->y + row * a->size;
        lanes squares = all(0);
        for (long i = 0; i < a->size; i += LANES) {
            const lanes number = opened(a, x + i, gate + i, a->size - i);
            squares += number * number;
        }
        const float factor = 1.0f / sqrtf(sum_of(squares) / a->size + a->eps);
        for (long i = 0; i < a->size; i += LANES) {
            const long left = a->size - i;
            lanes number = opened(a, x + i, gate + i, left) * factor * part_or_all(weight + i, left);
            if (!a->gates_first) number *= activate(1, part_or_all(gate + i, left));
            if (left < LANES) store_part(y + i, number, left);
            else store(y + i, number);
        }
    }
}

// x [tokens][groups][size]; gate has the same shape, with tokens gate_stride apart; weight [groups][size] with rows weight_stride apart, 0 for one shared
// row -> y as x.
void NAME(gated_norm)(const scalar *x, const scalar *gate, const scalar *weight, scalar *y, long tokens, long groups, long size, long gate_stride,
                      long weight_stride, float eps, int gates_first, int threads) {
    const long rows = tokens * groups, rows_per_piece = 1 + PIECE_ELEMENTS / size;
    const arguments a = {x, gate, weight, y, rows, groups, size, gate_stride, weight_stride, rows_per_piece, eps, gates_first};
    share(normalise_rows, &a, (rows + rows_per_piece - 1) / rows_per_piece, threads);
}
