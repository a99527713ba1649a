// The state space of Mamba-2, token by token (kernels/state/ssd.py has the formula). A slab of a head's matrix stays in the first-level cache, as for the
// delta rule (delta_rule.c).
#include "states.h"

typedef struct {
    const scalar *xbc, *steps;
    const float *decay_logs, *step_bias, *skip;
    scalar *out;
    head_states states;
    long xbc_stride, steps_stride, groups;
} arguments;

typedef struct {
    float b[TOKENS][MOST_ROWS], c[TOKENS][MOST_ROWS], decay[TOKENS], step[TOKENS];
} prepared;

static void prepare(const arguments *a, long head, long first, long tokens, prepared *p) {
    const long rows = a->states.rows, group = head / (a->states.heads / a->groups);
    const float rate = -expf(a->decay_logs[head]);
    for (long i = 0; i < tokens; i++) {
        const scalar *b = a->xbc + (first + i) * a->xbc_stride + a->states.heads * a->states.columns + group * rows;
        widened(b, rows, p->b[i]);
        widened(b + a->groups * rows, rows, p->c[i]);
        p->step[i] = softplus(get(a->steps[(first + i) * a->steps_stride + head]) + a->step_bias[head]);
        p->decay[i] = expf(rate * p->step[i]);
    }
}

// Computes one token in one slab, as in delta_rule.c.
static __attribute__((noinline)) void advance(const float *from, long from_line, float *to, long to_line, long rows, const float *b, const float *c,
                                              const float *x, float decay, float step, float skip, float *y) {
    lanes added[VECTORS], sum[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) added[j] = step * load_f32(x + j * LANES), sum[j] = all(0);
    for (long i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const lanes number = decay * load_f32(from + i * from_line + j * LANES) + all(b[i]) * added[j];
            store_f32(to + i * to_line + j * LANES, number);
            sum[j] += all(c[i]) * number;
        }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store_f32(y + j * LANES, sum[j] + skip * load_f32(x + j * LANES));
}

static void apply_tokens(const void *given, long head, long first, long tokens, matrix from, matrix to) {
    const arguments *a = given;
    const long values = a->states.columns;
    prepared p;
    prepare(a, head, first, tokens, &p);
    for (long begin = 0; begin < values; begin += COLUMNS, from.numbers += from.slab, to.numbers += to.slab) {
        const long n = values - begin < COLUMNS ? values - begin : COLUMNS;
        for (long i = 0; i < tokens; i++) {
            float x[COLUMNS] = {0}, y[COLUMNS];
            widened(a->xbc + (first + i) * a->xbc_stride + head * values + begin, n, x);
            advance(from.numbers, from.line, to.numbers, to.line, a->states.rows, p.b[i], p.c[i], x, p.decay[i], p.step[i], a->skip[head], y);
            narrowed(y, n, a->out + ((first + i) * a->states.heads + head) * values + begin);
        }
    }
}

static void apply(const void *given, long piece) { advance_over_runs(given, &((const arguments *)given)->states, piece, apply_tokens); }

// xbc [tokens][heads * values + 2 * groups * rows]; steps [tokens][heads]; rows of both are xbc_stride and steps_stride apart; decay_logs, step_bias, skip
// [heads]; states: blocks of [heads][rows][values], state_stride apart -> out [tokens][heads][values].
void NAME(ssd)(const scalar *xbc, const scalar *steps, const float *decay_logs, const float *step_bias, const float *skip, float *states, scalar *out,
               const int64_t *before, const int64_t *first_runs, const int64_t *ends, const int64_t *after, long sequences, long xbc_stride,
               long steps_stride, long groups, long heads, long rows, long values, long state_stride, int threads) {
    const head_states all_states = {states, {before, first_runs, ends, after}, heads, rows, values, state_stride};
    const arguments a = {xbc, steps, decay_logs, step_bias, skip, out, all_states, xbc_stride, steps_stride, groups};
    share(apply, &a, sequences * heads, threads);
}
