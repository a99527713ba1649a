// The operations between the fused projection and attention: heads are normalised if the model does so, the first numbers of queries and keys are rotated,
// and keys and values are written to their slots of the paged cache. Queries stay in place, in the rows of the projection, unless gates are between them.
#include "fp8.h"
#include "rms.h"

#define PIECE_ELEMENTS (1 << 12)

// Rotates pairs of dimensions: i with i + half.
static void turn(scalar *x, const float *cos, const float *sin, long half) {
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes a = load(x + i), b = load(x + half + i), c = load_f32(cos + i), s = load_f32(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = get(x[i]), b = get(x[half + i]);
        x[i] = put(a * cos[i] - b * sin[i]);
        x[half + i] = put(b * cos[i] + a * sin[i]);
    }
}

typedef struct {
    scalar *qkv, *queries;
    const float *cos, *sin;
    const int64_t *slots;
    void *k_cache, *v_cache;
    const void *norm;
    const float *kv_scales;
    long tokens, heads, kv_heads, head_dim, half, block_size, block_stride, token_stride, head_stride, tokens_per_piece;
    int wide_norm;
    float eps;
} arguments;

// Normalises and rotates a head, the `number`-th of queries and keys. `to` may be `from`.
static void rotate_head(const arguments *a, long token, long number, const scalar *from, scalar *to) {
    const long at = number * a->head_dim;
    if (a->norm) {
        const void *weight = a->wide_norm ? (const void *)((const float *)a->norm + at) : (const void *)((const scalar *)a->norm + at);
        normalise(from, weight, a->wide_norm, a->eps, to, a->head_dim);
    } else if (to != from) memcpy(to, from, a->head_dim * sizeof *to);
    turn(to, a->cos + token * a->half, a->sin + token * a->half, a->half);
}

static void rotate_token(const arguments *a, long token) {
    const long head_dim = a->head_dim, apart = (a->queries ? 2 : 1) * head_dim;
    scalar *rows = a->qkv + token * (a->heads * apart + 2 * a->kv_heads * head_dim), *keys = rows + a->heads * apart;
    for (long head = 0; head < a->heads; head++) {
        scalar *query = rows + head * apart;
        rotate_head(a, token, head, query, a->queries ? a->queries + (token * a->heads + head) * head_dim : query);
    }
    for (long head = 0; head < a->kv_heads; head++) rotate_head(a, token, a->heads + head, keys + head * head_dim, keys + head * head_dim);
    const scalar *values = keys + a->kv_heads * head_dim;
    const long slot = a->slots[token], at = slot / a->block_size * a->block_stride + slot % a->block_size * a->token_stride;
    for (long head = 0; head < a->kv_heads; head++) {
        const long to = at + head * a->head_stride, from = head * head_dim;
        if (a->kv_scales) {
            narrow_fp8(keys + from, a->kv_scales[0], (uint8_t *)a->k_cache + to, head_dim);
            narrow_fp8(values + from, a->kv_scales[1], (uint8_t *)a->v_cache + to, head_dim);
        } else {
            memcpy((scalar *)a->k_cache + to, keys + from, head_dim * sizeof *rows);
            memcpy((scalar *)a->v_cache + to, values + from, head_dim * sizeof *rows);
        }
    }
}

static void rotate_tokens(const void *given, long piece) {
    const arguments *a = given;
    const long begin = piece * a->tokens_per_piece, end = begin + a->tokens_per_piece;
    for (long token = begin; token < end && token < a->tokens; token++) rotate_token(a, token);
}

// qkv [tokens][heads + 2 * kv_heads][head_dim]; cos, sin [tokens][half]; slots [tokens]. Both caches have the same strides, counted in numbers. queries:
// NULL or, if each query is followed by a gate, where the queries are written, [tokens][heads][head_dim].
// norm: weights [heads + kv_heads][head_dim] or NULL. kv_scales: for FP8 caches, the factors by which a stored key and a stored value are multiplied; else
// NULL.
void NAME(rotate_and_cache)(scalar *qkv, scalar *queries, const float *cos, const float *sin, const int64_t *slots, void *k_cache, void *v_cache, const void *norm,
                            long tokens, long heads, long kv_heads, long head_dim, long half, long block_size, long block_stride, long token_stride,
                            long head_stride, int wide_norm, float eps, const float *kv_scales, int threads) {
    const long per_piece = 1 + PIECE_ELEMENTS / ((heads + 2 * kv_heads) * head_dim);
    const arguments a = {qkv,       queries,  cos,      sin,  slots,      k_cache,      v_cache,      norm,        kv_scales, tokens, heads,
                         kv_heads,  head_dim, half,     block_size, block_stride, token_stride, head_stride, per_piece, wide_norm, eps};
    share(rotate_tokens, &a, (tokens + per_piece - 1) / per_piece, threads);
}
