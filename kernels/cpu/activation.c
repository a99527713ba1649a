// Gated activations of whole prompts, whose gate and up are side by side in a row, as the fused matrix product writes them; and gates of mixed tokens.
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

typedef struct {
    const scalar *x, *gates;
    scalar *y;
    long tokens, groups, size, x_token, x_group, gates_token, gates_group, tokens_per_piece;
    int by_sigmoid;
} mixed;

INLINE lanes opened(int by_sigmoid, lanes x, lanes gate) { return by_sigmoid ? x / (1.0f + exp_of(-gate)) : x * gate; }

static void gate_tokens(const void *arguments, long piece) {
    const mixed *a = arguments;
    const long size = a->size, begin = piece * a->tokens_per_piece, end = begin + a->tokens_per_piece;
    for (long token = begin; token < end && token < a->tokens; token++)
        for (long group = 0; group < a->groups; group++) {
            const scalar *x = a->x + token * a->x_token + group * a->x_group, *gates = a->gates + token * a->gates_token + group * a->gates_group;
            scalar *y = a->y + (token * a->groups + group) * size;
            long i = 0;
            for (; i + LANES <= size; i += LANES) store(y + i, opened(a->by_sigmoid, load(x + i), load(gates + i)));
            if (i < size) store_part(y + i, opened(a->by_sigmoid, load_part(x + i, size - i), load_part(gates + i, size - i)), size - i);
        }
}

// x, gates [tokens][groups][size], whose tokens and groups are so many numbers apart -> y [tokens][groups][size].
void NAME(apply_gate)(const scalar *x, const scalar *gates, scalar *y, long tokens, long groups, long size, long x_token, long x_group, long gates_token,
                      long gates_group, int by_sigmoid, int threads) {
    const long per_piece = 1 + PIECE_ELEMENTS / (groups * size + 1);
    const mixed a = {x, gates, y, tokens, groups, size, x_token, x_group, gates_token, gates_group, per_piece, by_sigmoid};
    share(gate_tokens, &a, (tokens + per_piece - 1) / per_piece, threads);
}
