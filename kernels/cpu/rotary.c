// What lies between the fused projection and attention: heads are normalised where a model does so, queries and keys are turned, and keys and values go
// into their slots of the paged cache. Queries stay where they are, in the projection's own rows.
#include "lanes.h"

#define SERIAL_ELEMENTS (1 << 13)

static void normalise_head(scalar *x, const void *weight, int wide_weight, float eps, long size) {
    float sum = 0;
    for (long i = 0; i < size; i++) sum += get(x[i]) * get(x[i]);
    const float factor = 1.0f / sqrtf(sum / size + eps);
    for (long i = 0; i < size; i++) x[i] = put(get(x[i]) * factor * (wide_weight ? ((const float *)weight)[i] : get(((const scalar *)weight)[i])));
}

// Dimension i turns together with i + half.
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

// qkv [tokens][heads + 2 * kv_heads][head_dim]; cos, sin [tokens][head_dim / 2]; slots [tokens]; a block of the caches is contiguous, block_stride
// scalars lie between the starts of two. norm: weights [heads + kv_heads][head_dim] or NULL.
void NAME(rotate_and_cache)(scalar *qkv, const float *cos, const float *sin, const int64_t *slots, scalar *k_cache, scalar *v_cache, const void *norm,
                            long tokens, long heads, long kv_heads, long head_dim, long block_size, long block_stride, int wide_norm, float eps,
                            int threads) {
    const long per_token = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2, kv_size = kv_heads * head_dim;
    if (tokens * per_token < SERIAL_ELEMENTS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long token = 0; token < tokens; token++) {
        scalar *rows = qkv + token * per_token;
        for (long head = 0; head < heads + kv_heads; head++) {
            if (norm) {
                const long at = head * head_dim;
                normalise_head(rows + at, wide_norm ? (const void *)((const float *)norm + at) : (const void *)((const scalar *)norm + at), wide_norm,
                               eps, head_dim);
            }
            turn(rows + head * head_dim, cos + token * half, sin + token * half, half);
        }
        const long at = slots[token] / block_size * block_stride + slots[token] % block_size * kv_size;
        memcpy(k_cache + at, rows + heads * head_dim, kv_size * sizeof *rows);
        memcpy(v_cache + at, rows + heads * head_dim + kv_size, kv_size * sizeof *rows);
    }
}
