// The gated delta rule, token by token (kernels/state/delta_rule.py has the formula).
//
// A slab of a head's matrix, 32 KiB for 128 keys, stays in the first-level cache from token to token. So a token takes 3 multiply-adds for each number of
// the state, which run nearly as fast as from registers. Matrix products over a chunk of tokens would take as many in fp32, and a token's bits would
// depend on its chunk.
#include "states.h"

#define EPS 1e-6f  // as in kernels/state/delta_rule.py

typedef struct {
    const scalar *qkv, *steps, *decays;
    const float *decay_logs, *decay_bias;
    scalar *out;
    head_states states;
    long qkv_stride, steps_stride, decays_stride, key_heads, row_decays;
} arguments;

typedef struct {
    float q[TOKENS][MOST_ROWS], k[TOKENS][MOST_ROWS], decay[TOKENS], row_decay[TOKENS][MOST_ROWS], step[TOKENS];
} prepared;

// y = x * scale / |x|
static void unit(const scalar *x, long n, float scale, float *y) {
    lanes squares = all(0);
    widened(x, n, y);
    for (long i = 0; i < n; i += LANES) squares += load_f32(y + i) * load_f32(y + i);
    const float factor = scale / sqrtf(sum_of(squares) + EPS);
    for (long i = 0; i < n; i += LANES) store_f32(y + i, load_f32(y + i) * factor);
}

static void prepare(const arguments *a, long head, long first, long tokens, prepared *p) {
    const long keys = a->states.rows;
    const long key_head = head / (a->states.heads / a->key_heads);
    const float rate = -expf(a->decay_logs[head]), scale = 1.0f / sqrtf((float)keys);
    for (long i = 0; i < tokens; i++) {
        const scalar *q = a->qkv + (first + i) * a->qkv_stride + key_head * keys;
        unit(q, keys, scale, p->q[i]);
        unit(q + a->key_heads * keys, keys, 1.0f, p->k[i]);
        const scalar *decays = a->decays + (first + i) * a->decays_stride;
        if (a->row_decays)
            for (long row = 0; row < keys; row++)
                p->row_decay[i][row] = expf(rate * softplus(get(decays[head * keys + row]) + a->decay_bias[head * keys + row]));
        else
            p->decay[i] = expf(rate * softplus(get(decays[head]) + a->decay_bias[head]));
        p->step[i] = 1.0f / (1.0f + expf(-get(a->steps[(first + i) * a->steps_stride + head])));
    }
}

// Computes one token in one slab. Lines of `from` and `to`, which may be equal, are from_line and to_line apart. Not inlined, so that its bits are the
// same everywhere.
static __attribute__((noinline)) void advance(const float *from, long from_line, float *to, long to_line, long keys, const float *q, const float *k,
                                              const float *v, float decay, float step, float *o) {
    lanes seen[2][VECTORS], change[VECTORS], sum[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) seen[0][j] = seen[1][j] = sum[j] = all(0);
    long i = 0;
    for (; i + 2 <= keys; i += 2)
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) seen[r][j] += all(k[i + r]) * load_f32(from + (i + r) * from_line + j * LANES);
    if (i < keys)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) seen[0][j] += all(k[i]) * load_f32(from + i * from_line + j * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) change[j] = step * (load_f32(v + j * LANES) - decay * (seen[0][j] + seen[1][j]));
    for (i = 0; i < keys; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const lanes number = decay * load_f32(from + i * from_line + j * LANES) + all(k[i]) * change[j];
            store_f32(to + i * to_line + j * LANES, number);
            sum[j] += all(q[i]) * number;
        }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store_f32(o + j * LANES, sum[j]);
}

// As advance, with a decay for each row.
static __attribute__((noinline)) void advance_rows(const float *from, long from_line, float *to, long to_line, long keys, const float *q, const float *k,
                                                   const float *v, const float *decay, float step, float *o) {
    lanes seen[2][VECTORS], change[VECTORS], sum[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) seen[0][j] = seen[1][j] = sum[j] = all(0);
    long i = 0;
    for (; i + 2 <= keys; i += 2)
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) seen[r][j] += all(k[i + r] * decay[i + r]) * load_f32(from + (i + r) * from_line + j * LANES);
    if (i < keys)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) seen[0][j] += all(k[i] * decay[i]) * load_f32(from + i * from_line + j * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) change[j] = step * (load_f32(v + j * LANES) - (seen[0][j] + seen[1][j]));
    for (i = 0; i < keys; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const lanes number = all(decay[i]) * load_f32(from + i * from_line + j * LANES) + all(k[i]) * change[j];
            store_f32(to + i * to_line + j * LANES, number);
            sum[j] += all(q[i]) * number;
        }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store_f32(o + j * LANES, sum[j]);
}

static void apply_tokens(const void *given, long head, long first, long tokens, matrix from, matrix to) {
    const arguments *a = given;
    const long values = a->states.columns;
    prepared p;
    prepare(a, head, first, tokens, &p);
    for (long begin = 0; begin < values; begin += COLUMNS, from.numbers += from.slab, to.numbers += to.slab) {
        const long n = values - begin < COLUMNS ? values - begin : COLUMNS;
        for (long i = 0; i < tokens; i++) {
            float v[COLUMNS] = {0}, o[COLUMNS];
            widened(a->qkv + (first + i) * a->qkv_stride + 2 * a->key_heads * a->states.rows + head * values + begin, n, v);
            if (a->row_decays)
                advance_rows(from.numbers, from.line, to.numbers, to.line, a->states.rows, p.q[i], p.k[i], v, p.row_decay[i], p.step[i], o);
            else
                advance(from.numbers, from.line, to.numbers, to.line, a->states.rows, p.q[i], p.k[i], v, p.decay[i], p.step[i], o);
            narrowed(o, n, a->out + ((first + i) * a->states.heads + head) * values + begin);
        }
    }
}

static void apply(const void *given, long piece) { advance_over_runs(given, &((const arguments *)given)->states, piece, apply_tokens); }

// qkv [tokens][2 * key_heads * keys + value_heads * values]; steps, decays [tokens][value_heads]; rows of these three are qkv_stride, steps_stride and
// decays_stride apart; decay_logs, decay_bias [value_heads]; with row_decays, decays [tokens][value_heads * keys] and decay_bias [value_heads * keys]; states: blocks of [value_heads][keys][values], state_stride apart -> out
// [tokens][value_heads][values].
void NAME(gated_delta_rule)(const scalar *qkv, const scalar *steps, const scalar *decays, const float *decay_logs, const float *decay_bias, float *states,
                            scalar *out, const int64_t *before, const int64_t *first_runs, const int64_t *ends, const int64_t *after, long sequences,
                            long qkv_stride, long steps_stride, long decays_stride, long key_heads, long value_heads, long keys, long values,
                            long state_stride, long row_decays, int threads) {
    const head_states all_states = {states, {before, first_runs, ends, after}, value_heads, keys, values, state_stride};
    const arguments a = {qkv, steps, decays, decay_logs, decay_bias, out, all_states, qkv_stride, steps_stride, decays_stride, key_heads, row_decays};
    share(apply, &a, sequences * value_heads, threads);
}
