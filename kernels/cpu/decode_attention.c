// Attention of the last tokens of each sequence, one or a few, over the paged cache. Keys and values are read in their blocks, each from memory once, and
// not gathered.
//
// If there are enough sequences, a thread takes all key-value heads of a sequence, because they are in the same blocks. A head's result does not depend on
// how heads and sequences are divided among threads, nor on later tokens: scores are processed block by block, in order.
#include "attention.h"

#define MOST_FETCHED (512l << 10)  // bytes of keys and values that fit in a thread's cache beside the weights that it reads

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
