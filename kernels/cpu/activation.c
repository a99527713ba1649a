// Gated activations of whole prompts. Gate and up are side by side in a row, as the fused matrix product writes them.
#include "activation.h"

#define PIECE_ELEMENTS (1 << 13)

typedef struct {
    const scalar *x;
    scalar *y;
    long tokens, size, tokens_per_piece;
    int activation;
} rows;

static void activate_rows(const void *arguments, long piece) {
    const rows *a = arguments;
    const long size = a->size, begin = piece * a->tokens_per_piece, end = begin + a->tokens_per_piece;
    for (long token = begin; token < end && token < a->tokens; token++) {
        const scalar *gate = a->x + token * 2 * size, *up = gate + size;
        scalar *into = a->y + token * size;
        long i = 0;
        for (; i + LANES <= size; i += LANES) store(into + i, gated(a->activation, load(gate + i), load(up + i)));
        if (i < size) store_part(into + i, gated(a->activation, load_part(gate + i, size - i), load_part(up + i, size - i)), size - i);
    }
}

// x [tokens][2 * size] -> y [tokens][size]. activation: 1 is silu, 2 is gelu in its tanh form.
void NAME(gated_activation)(const scalar *x, scalar *y, long tokens, long size, int activation, int threads) {
    const rows arguments = {x, y, tokens, size, 1 + PIECE_ELEMENTS / (size + 1), activation};
    share(activate_rows, &arguments, (tokens + arguments.tokens_per_piece - 1) / arguments.tokens_per_piece, threads);
}
