// Attention of a row, a query of one head, to some tokens at a time: scores, their weights relative to the largest score so far, and the sum of values.
#pragma once
#include "fp8.h"

#define TOKENS 16                  // tokens whose scores are computed together
// Sums of scores that stay in registers. If there are fewer than TOKENS, two rows share the loads of keys: 1,000 tokens of eight heads of 128 numbers for 32
// query heads take a thread of Zen 3 0.62 ms in fp32, and 0.90 for one row after the other.
#define SUMS (LANES == 16 ? 16 : 8)

typedef struct {
    float most, total;  // most: the largest score so far; total: the sum of exp(score - most)
    float sum[];        // [head_dim] sum of values times exp(score - most)
} head_state;

// scores[m][t] = q[m] . k[t] * scale for one row or two and up to TOKENS tokens of a block; those of row m from number seen[m] on become minus infinity.
// `whole`: TOKENS keys can be read, even if `tokens` is less.
INLINE void score(const int rows, const scalar *const *q, const scalar *k, long token_stride, long tokens, const int whole, const long *seen,
                  long head_dim, float scale, float *scores) {
    const int at_once = SUMS / rows;
    const long pieces = head_dim / PIECE * PIECE;
    lanes sum[2][TOKENS];
    if (whole) {
        for (int first = 0; first < TOKENS; first += at_once) {
            lanes part[SUMS];
#pragma GCC unroll 16
            for (int i = 0; i < SUMS; i++) part[i] = all(0);
            for (long i = 0; i < pieces; i += PIECE)
#pragma GCC unroll 16
                for (int t = 0; t < at_once; t++) {
                    const piece key = load_piece(k + (first + t) * token_stride + i);
#pragma GCC unroll 2
                    for (int m = 0; m < rows; m++) part[m * at_once + t] = multiply_add(part[m * at_once + t], key, load_piece(q[m] + i));
                }
#pragma GCC unroll 16
            for (int i = 0; i < SUMS; i++) sum[i / at_once][first + i % at_once] = part[i];
        }
    } else {
        for (int m = 0; m < rows; m++) {
            for (int t = 0; t < TOKENS; t++) sum[m][t] = all(0);
            for (long i = 0; i < pieces; i += PIECE)
                for (long t = 0; t < tokens; t++) sum[m][t] = multiply_add(sum[m][t], load_piece(k + t * token_stride + i), load_piece(q[m] + i));
        }
    }
    for (int m = 0; m < rows; m++, scores += TOKENS) {
        const long rest = head_dim - pieces;
        for (long t = 0; rest && t < tokens; t++)
            sum[m][t] = multiply_add(sum[m][t], part_of_piece(k + t * token_stride + pieces, rest), part_of_piece(q[m] + pieces, rest));
        sums_of_16(sum[m], scores);
        for (int t = 0; t < TOKENS; t += LANES) store_f32(scores + t, only_between(load_f32(scores + t) * scale, 0, seen[m] - t));
    }
}

// Turns scores into weights relative to the new maximum, and rescales the earlier sums to it.
INLINE void rescale(head_state *state, float *scores, long head_dim) {
    float most = state->most;
    for (int t = 0; t < TOKENS; t += LANES) {
        const float largest = max_of(load_f32(scores + t));
        most = largest > most ? largest : most;
    }
    if (most > state->most) {
        float factor[LANES];
        store_f32(factor, exp_of(all(state->most - most)));
        state->total *= factor[0];
        for (long i = 0; i < head_dim; i++) state->sum[i] *= factor[0];
        state->most = most;
    }
    float total = 0;
    for (int t = 0; t < TOKENS; t += LANES) {
        lanes weights = exp_of(load_f32(scores + t) - most);
        store_f32(scores + t, weights);
        total += sum_of(weights);
    }
    state->total += total;
}

// Fetches the next tokens: blocks are scattered, so no hardware prefetcher finds them.
INLINE void fetch(const char *rows, long token_bytes, long tokens, long row_bytes) {
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < row_bytes; i += 64) __builtin_prefetch(rows + t * token_bytes + i, 0, 2);
}

// sum[g] += weights[g][t] * v[t] for one row or two and some of their columns: a value is read and widened once for both rows.
INLINE void weigh_columns(const int vectors, head_state **states, const int rows, const float *weights, const scalar *v, long token_stride, long tokens,
                          long column) {
    lanes sum[2][4];
    for (int g = 0; g < rows; g++)
        for (int j = 0; j < vectors; j++) sum[g][j] = load_f32(states[g]->sum + column + j * LANES);
    for (long t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            lanes value = load(v + t * token_stride + column + j * LANES);
#pragma GCC unroll 2
            for (int g = 0; g < rows; g++) sum[g][j] += weights[g * TOKENS + t] * value;
        }
    for (int g = 0; g < rows; g++)
        for (int j = 0; j < vectors; j++) store_f32(states[g]->sum + column + j * LANES, sum[g][j]);
}

INLINE void weigh(head_state **states, const int rows, const float *weights, const scalar *v, long token_stride, long tokens, long head_dim) {
    long i = 0;
    for (; i + 4 * LANES <= head_dim; i += 4 * LANES) weigh_columns(4, states, rows, weights, v, token_stride, tokens, i);
    for (; i + LANES <= head_dim; i += LANES) weigh_columns(1, states, rows, weights, v, token_stride, tokens, i);
    for (; i < head_dim; i++)
        for (int g = 0; g < rows; g++)
            for (long t = 0; t < tokens; t++)  // a fused operation for one row and for two, which a compiler would decide separately
                states[g]->sum[i] = __builtin_fmaf(weights[g * TOKENS + t], get(v[t * token_stride + i]), states[g]->sum[i]);
}
