// Recurrent states of sequences: their addresses, and copies of a head's matrix in a core's cache.
#pragma once
#include "lanes.h"

#define VECTORS 4                   // vectors in a line of a slab: enough independent sums to hide the latency of additions
#define COLUMNS (VECTORS * LANES)   // columns of a slab: a slab has so many columns of a head's matrix, row after row
#define MOST_ROWS 256               // most rows of a head's matrix
#define MOST_NUMBERS (1 << 16)      // most numbers of a head's matrix, padded to slabs
#define TOKENS 16                   // tokens that are prepared at a time, for all slabs

typedef struct {
    const int64_t *before, *first_runs, *ends, *after;  // StateBatch of kernels/state/state_batch.py
} runs;

INLINE long first_token(const runs *r, long sequence) {
    const int64_t run = r->first_runs[sequence];
    return run ? r->ends[run - 1] : 0;
}

INLINE long slabs_of(long columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// to[slab][row][COLUMNS] = from[row][columns], with zeros after the last column; all zeros if `from` is NULL.
static void take(const float *from, long rows, long columns, float *to) {
    for (long slab = 0; slab < slabs_of(columns); slab++) {
        const long begin = slab * COLUMNS, n = columns - begin < COLUMNS ? columns - begin : COLUMNS;
        for (long row = 0; row < rows; row++, to += COLUMNS) {
            if (!from || n < COLUMNS) memset(to, 0, COLUMNS * sizeof *to);
            if (from) memcpy(to, from + row * columns + begin, n * sizeof *to);
        }
    }
}

static void give(const float *from, long rows, long columns, float *to) {
    for (long slab = 0; slab < slabs_of(columns); slab++) {
        const long begin = slab * COLUMNS, n = columns - begin < COLUMNS ? columns - begin : COLUMNS;
        for (long row = 0; row < rows; row++, from += COLUMNS) memcpy(to + row * columns + begin, from, n * sizeof *to);
    }
}

// y[0 .. n] = x in fp32, followed by zeros up to a whole vector.
INLINE void widened(const scalar *x, long n, float *y) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_f32(y + i, load(x + i));
    if (i < n) store_f32(y + i, load_part(x + i, n - i));
}

INLINE void narrowed(const float *x, long n, scalar *y) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, load_f32(x + i));
    if (i < n) store_part(y + i, load_f32(x + i), n - i);
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The states of all heads, and the runs of tokens that use them.
typedef struct {
    float *numbers;  // blocks of [heads][rows][columns], `stride` apart
    runs runs;
    long heads, rows, columns, stride;
} head_states;

// A head's matrix: its slabs are `slab` numbers apart, and the lines of a slab `line`.
typedef struct {
    float *numbers;
    long slab, line;
} matrix;

// Computes up to TOKENS tokens of one head, from `first` on.
typedef void (*advance_head)(const void *given, long head, long first, long tokens, matrix from, matrix to);

// Computes all tokens of a sequence in one head; piece = sequence * heads + head.
INLINE void advance_over_runs(const void *given, const head_states *s, long piece, advance_head advance) {
    const long sequence = piece / s->heads, head = piece % s->heads;
    float *states = s->numbers + head * s->rows * s->columns, numbers[MOST_NUMBERS] __attribute__((aligned(64)));
    const int64_t block = s->runs.before[sequence];
    const long first_run = s->runs.first_runs[sequence], end_run = s->runs.first_runs[sequence + 1];
    float *before = block < 0 ? NULL : states + block * s->stride;
    long token = first_token(&s->runs, sequence);
    const int is_kept = s->runs.after[first_run] >= 0;
    if (before && is_kept && s->columns % COLUMNS == 0 && s->runs.ends[end_run - 1] == token + 1) {  // a decode: from the old block directly to the new one
        float *after = states + s->runs.after[first_run] * s->stride;
        advance(given, head, token, 1, (matrix){before, COLUMNS, s->columns}, (matrix){after, COLUMNS, s->columns});
        return;
    }
    const matrix kept = {numbers, s->rows * COLUMNS, COLUMNS};
    take(before, s->rows, s->columns, numbers);
    for (long run = first_run; run < end_run; run++) {
        for (long tokens; token < s->runs.ends[run]; token += tokens) {
            tokens = s->runs.ends[run] - token < TOKENS ? s->runs.ends[run] - token : TOKENS;
            advance(given, head, token, tokens, kept, kept);
        }
        if (is_kept) give(numbers, s->rows, s->columns, states + s->runs.after[run] * s->stride);
    }
}
