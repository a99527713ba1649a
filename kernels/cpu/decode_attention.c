// Attention of the last tokens of each sequence, one or a few, over the paged cache. Keys and values are read in their blocks, each from memory once, and
// not gathered.
//
// If there are enough sequences, a thread takes all key-value heads of a sequence, because they are in the same blocks. A head's result does not depend on
// how heads and sequences are divided among threads, nor on later tokens: scores are processed block by block, in order.
#include "fp8.h"

#define TOKENS 16                  // tokens whose scores are computed together
// Sums of scores that stay in registers. If there are fewer than TOKENS, two rows share the loads of keys: 1,000 tokens of eight heads of 128 numbers for 32
// query heads take a thread of Zen 3 0.62 ms in fp32, and 0.90 for one row after the other.
#define SUMS (LANES == 16 ? 16 : 8)
#define MOST_FETCHED (512l << 10)  // bytes of keys and values that fit in a thread's cache beside the weights that it reads

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

typedef struct {
    const scalar *q;
    const char *k_cache, *v_cache;
    const int64_t *tables, *context_lens;
    const int32_t *starts, *verified_lens;  // for a few tokens per sequence, instead of context_lens; else NULL
    const scalar *sinks;
    const float *kv_scales;  // of FP8 caches; else NULL
    scalar *out;
    long seqs, q_stride, max_blocks, heads, kv_heads, head_dim, block_size, block_stride, token_stride, head_stride, window, parts;
    float scale;
} arguments;

INLINE long bytes_of(const arguments *g, long numbers) { return g->kv_scales ? numbers : numbers * (long)sizeof(scalar); }

INLINE long context_of(const arguments *g, long seq) { return g->starts ? g->verified_lens[seq] : g->context_lens[seq]; }

INLINE long first_seen(const arguments *g, long context) { return g->window && g->window < context ? context - g->window : 0; }

// Computes the last `queries` of a sequence's first `end` tokens, for key-value heads kv_begin .. kv_end. `after`: the sequence that this thread probably
// takes next.
static void attend(const arguments *g, long seq, long after, const scalar *q, scalar *out, long queries, long end, long kv_begin, long kv_end) {
    const int64_t *table = g->tables + seq * g->max_blocks;
    const long first = first_seen(g, end), group = g->heads / g->kv_heads, rows = queries * group;  // a row is a query and a head of the group, queries first
    const long head_dim = g->head_dim, row_bytes = bytes_of(g, head_dim), token_bytes = bytes_of(g, g->token_stride);
    const long token_stride = g->kv_scales ? head_dim : g->token_stride;  // stride of the tokens that are multiplied; FP8 tokens are widened first
    const float scale = g->kv_scales ? g->scale * g->kv_scales[0] : g->scale, value_scale = g->kv_scales ? g->kv_scales[1] : 1.0f;
    scalar widened[g->kv_scales ? 2 * TOKENS * head_dim : 1] __attribute__((aligned(64)));
    const long state_size = (sizeof(head_state) / sizeof(float) + head_dim + 15) / 16 * 16;
    float memory[(kv_end - kv_begin) * rows * state_size] __attribute__((aligned(64)));
#define STATE(kv_head, row) ((head_state *)(memory + (((kv_head) - kv_begin) * rows + (row)) * state_size))
    for (long kv_head = kv_begin; kv_head < kv_end; kv_head++)
        for (long row = 0; row < rows; row++) {
            head_state *state = STATE(kv_head, row);
            memset(state, 0, state_size * sizeof(float));
            state->most = g->sinks ? get(g->sinks[kv_head * group + row % group]) : -INFINITY;
            state->total = g->sinks ? 1.0f : 0.0f;
        }
    for (long token = first; token < end;) {
        const long in_block = token % g->block_size, place = table[token / g->block_size] * g->block_stride + in_block * g->token_stride;
        const int whole = in_block + TOKENS <= g->block_size;
        long tokens = whole ? TOKENS : g->block_size - in_block;
        tokens = tokens < TOKENS ? tokens : TOKENS;
        tokens = tokens < end - token ? tokens : end - token;
        const int is_last = token + tokens >= end;
        const int64_t *ahead_table = is_last ? g->tables + after * g->max_blocks : table;
        const long ahead_end = is_last ? context_of(g, after) : end, ahead = is_last ? first_seen(g, ahead_end) : token + tokens;
        const long left = is_last && after == seq ? 0 : ahead_end - ahead;
        const long ahead_tokens = left < TOKENS ? left : TOKENS;
        const long next = left > 0 ? ahead_table[ahead / g->block_size] * g->block_stride + ahead % g->block_size * g->token_stride : 0;
        for (long kv_head = kv_begin; kv_head < kv_end; kv_head++) {
            const long at = bytes_of(g, place + kv_head * g->head_stride), next_at = bytes_of(g, next + kv_head * g->head_stride);
            fetch(g->k_cache + next_at, token_bytes, ahead_tokens, row_bytes);
            fetch(g->v_cache + next_at, token_bytes, ahead_tokens, row_bytes);
            const scalar *k = (const scalar *)(g->k_cache + at), *v = (const scalar *)(g->v_cache + at);
            if (g->kv_scales) {  // widened once for all rows
                for (long t = 0; t < (whole ? TOKENS : tokens); t++) {
                    widen_fp8((const uint8_t *)g->k_cache + at + t * token_bytes, widened + t * head_dim, head_dim);
                    if (t < tokens) widen_fp8((const uint8_t *)g->v_cache + at + t * token_bytes, widened + (TOKENS + t) * head_dim, head_dim);
                }
                k = widened, v = widened + TOKENS * head_dim;
            }
            for (long row = 0; row < rows; row += 2) {
                const int pair = row + 1 < rows ? 2 : 1;
                float weights[2 * TOKENS];
                head_state *states[2];
                const scalar *queries_of[2];
                long seen[2];
                for (int i = 0; i < pair; i++) {
                    const long query = (row + i) / group, head = kv_head * group + (row + i) % group;
                    queries_of[i] = q + query * g->q_stride + head * head_dim;
                    seen[i] = end - token - (queries - 1 - query);  // a query sees itself and the tokens before it
                    if (!whole && seen[i] > tokens) seen[i] = tokens;
                    states[i] = STATE(kv_head, row + i);
                }
#define SCORE(count, i) \
    do { \
        if (whole) score(count, queries_of + i, k, token_stride, tokens, 1, seen + i, head_dim, scale, weights + i * TOKENS); \
        else score(count, queries_of + i, k, token_stride, tokens, 0, seen + i, head_dim, scale, weights + i * TOKENS); \
    } while (0)
                if (pair == 2 && SUMS < TOKENS) SCORE(2, 0);
                else
                    for (int i = 0; i < pair; i++) SCORE(1, i);
#undef SCORE
                for (int i = 0; i < pair; i++) rescale(states[i], weights + i * TOKENS, head_dim);
                if (pair == 2) weigh(states, 2, weights, v, token_stride, tokens, head_dim);
                else weigh(states, 1, weights, v, token_stride, tokens, head_dim);
            }
        }
        token += tokens;
    }
    for (long kv_head = kv_begin; kv_head < kv_end; kv_head++)
        for (long row = 0; row < rows; row++) {
            scalar *to = out + (row / group * g->heads + kv_head * group + row % group) * head_dim;
            const head_state *state = STATE(kv_head, row);
            const float factor = value_scale / state->total;
            for (long i = 0; i < head_dim; i++) to[i] = put(state->sum[i] * factor);
        }
}

// Computes all heads of a sequence, or some of them.
static void attend_part(const void *given, long piece) {
    const arguments *a = given;
    const long seq = piece / a->parts, part = piece % a->parts, after = a->parts == 1 && seq + 1 < a->seqs ? seq + 1 : seq;
    const long kv_begin = a->kv_heads * part / a->parts, kv_end = a->kv_heads * (part + 1) / a->parts, row_size = a->heads * a->head_dim;
    const long start = a->starts ? a->starts[seq] : seq, queries = a->starts ? a->starts[seq + 1] - start : 1, end = context_of(a, seq);
    if (!a->window || a->window >= end) {
        attend(a, seq, after, a->q + start * a->q_stride, a->out + start * row_size, queries, end, kv_begin, kv_end);
        return;
    }
    for (long i = 0; i < queries; i++)  // the window of each query starts at a different token
        attend(a, seq, i + 1 < queries ? seq : after, a->q + (start + i) * a->q_stride, a->out + (start + i) * row_size, 1, end - queries + 1 + i, kv_begin,
               kv_end);
}

// Fetches the part-th TOKENS tokens of the keys and values of a piece: as many as threads can fetch while they compute projections, and as fit in their
// cache.
static int fetch_part(const void *given, long piece, long part) {
    const arguments *a = given;
    const long seq = piece / a->parts, heads = piece % a->parts;
    const long kv_begin = a->kv_heads * heads / a->parts, kv_end = a->kv_heads * (heads + 1) / a->parts;
    const long row_bytes = bytes_of(a, a->head_dim), bytes = TOKENS * (kv_end - kv_begin) * row_bytes * 2;
    const long end = context_of(a, seq), first = first_seen(a, end) + part * TOKENS;
    if (first >= end || part * bytes >= MOST_FETCHED) return 0;
    for (long token = first; token < first + TOKENS && token < end; token++) {
        const long at = a->tables[seq * a->max_blocks + token / a->block_size] * a->block_stride + token % a->block_size * a->token_stride;
        for (long kv_head = kv_begin; kv_head < kv_end; kv_head++) {
            fetch(a->k_cache + bytes_of(a, at + kv_head * a->head_stride), 0, 1, row_bytes);
            fetch(a->v_cache + bytes_of(a, at + kv_head * a->head_stride), 0, 1, row_bytes);
        }
    }
    return 1;
}

// Returns the number of parts into which a sequence's heads are divided, so that few sequences occupy all threads.
static long parts_of(long seqs, long kv_heads, int threads) {
    long parts = 1;
    while (threads > 1 && parts < kv_heads && seqs * parts < threads) parts++;
    return parts;
}

// q [seqs][heads][head_dim], q_stride scalars between sequences; tables [seqs][max_blocks]; context_lens [seqs] include the new token; window: 0 for the
// whole context; sinks [heads] or NULL; out [seqs][heads][head_dim]. Both caches have the same strides, counted in numbers. kv_scales: for FP8 caches, the
// factors by which a stored key and a stored value are multiplied; else NULL.
void NAME(decode_attention)(const scalar *q, const void *k_cache, const void *v_cache, const int64_t *tables, const int64_t *context_lens,
                            const scalar *sinks, scalar *out, long seqs, long q_stride, long max_blocks, long heads, long kv_heads, long head_dim,
                            long block_size, long block_stride, long token_stride, long head_stride, long window, float scale, const float *kv_scales, int threads) {
    const arguments a = {q,        k_cache,  v_cache,    tables,       context_lens, NULL,        NULL,   sinks,
                         kv_scales,
                         out,      seqs,     q_stride,   max_blocks,   heads,        kv_heads,    head_dim, block_size,
                         block_stride, token_stride, head_stride, window, parts_of(seqs, kv_heads, threads), scale};
    share_reading(attend_part, &a, sizeof a, (reading){.fetch = fetch_part}, seqs * a.parts, threads);
}

// The same for the last few tokens of each sequence, with the same bits: q [tokens][heads][head_dim], each sequence's from starts[seq] on; context_lens
// [seqs] include them; out [tokens][heads][head_dim].
void NAME(verify_attention)(const scalar *q, const void *k_cache, const void *v_cache, const int64_t *tables, const int32_t *starts,
                            const int32_t *context_lens, const scalar *sinks, scalar *out, long seqs, long q_stride, long max_blocks, long heads,
                            long kv_heads, long head_dim, long block_size, long block_stride, long token_stride, long head_stride, long window, float scale,
                            const float *kv_scales, int threads) {
    const arguments a = {q,        k_cache,  v_cache,    tables,       NULL,         starts,      context_lens, sinks,
                         kv_scales,
                         out,      seqs,     q_stride,   max_blocks,   heads,        kv_heads,    head_dim, block_size,
                         block_stride, token_stride, head_stride, window, parts_of(seqs, kv_heads, threads), scale};
    share_reading(attend_part, &a, sizeof a, (reading){.fetch = fetch_part}, seqs * a.parts, threads);
}
