// Latent attention in absorbed form: all heads of a token attend to the same cached vectors, whose first numbers are also the values. A token reads its
// whole context, or the positions that are selected for it.
//
// A thread takes all heads of a token or, if there are few tokens, some of them. Some vectors at a time are copied side by side, so that they stay in the
// first-level cache for all heads. A head's result depends neither on how heads and tokens are divided among threads nor on other tokens.
#include "attention.h"

typedef struct {
    const scalar *q;
    const char *cache;
    const int64_t *tables, *lens, *positions;  // positions: NULL if all are read
    const float *cache_scale;                  // of an FP8 cache; else NULL
    scalar *out;
    long tokens, heads, latent, width, table_stride, positions_stride, block_size, block_stride, token_stride, parts;
    float scale;
} arguments;

INLINE const char *row_of(const arguments *a, const int64_t *table, long position) {
    const long at = table[position / a->block_size] * a->block_stride + position % a->block_size * a->token_stride;
    return a->cache + (a->cache_scale ? at : at * (long)sizeof(scalar));
}

// Attends from heads begin .. end of a token.
static void attend(const arguments *a, long token, long begin, long end) {
    const int64_t *table = a->tables + token * a->table_stride, *positions = a->positions ? a->positions + token * a->positions_stride : NULL;
    const long width = a->width, latent = a->latent, heads = end - begin, len = a->lens[token];
    const long row_bytes = a->cache_scale ? width : width * (long)sizeof(scalar);
    const float factor = a->cache_scale ? a->cache_scale[0] : 1.0f, scale = a->scale * factor;
    const long state_size = (sizeof(head_state) / sizeof(float) + latent + 15) / 16 * 16;
    float memory[heads * state_size] __attribute__((aligned(64)));
    scalar rows[TOKENS * width] __attribute__((aligned(64)));
#define STATE(head) ((head_state *)(memory + (head) * state_size))
    for (long head = 0; head < heads; head++) {
        memset(STATE(head), 0, state_size * sizeof(float));
        STATE(head)->most = -INFINITY;
    }
    memset(rows, 0, sizeof rows);
    for (long first = 0; first < len; first += TOKENS) {
        const long count = len - first < TOKENS ? len - first : TOKENS, ahead = len - first - count < TOKENS ? len - first - count : TOKENS;
        for (long t = 0; t < ahead; t++) {
            const long at = first + count + t;
            fetch(row_of(a, table, positions ? positions[at] : at), 0, 1, row_bytes);
        }
        for (long t = 0; t < count; t++) {
            const char *from = row_of(a, table, positions ? positions[first + t] : first + t);
            if (a->cache_scale) widen_fp8((const uint8_t *)from, rows + t * width, width);
            else memcpy(rows + t * width, from, row_bytes);
        }
        for (long head = 0; head < heads; head += 2) {
            const int pair = head + 1 < heads ? 2 : 1;
            float weights[2 * TOKENS];
            head_state *states[2];
            const scalar *q[2];
            const long seen[2] = {count, count};
            for (int i = 0; i < pair; i++) {
                q[i] = a->q + (token * a->heads + begin + head + i) * width;
                states[i] = STATE(head + i);
            }
            if (pair == 2 && SUMS < TOKENS) score(2, q, rows, width, TOKENS, 1, seen, width, scale, weights);
            else
                for (int i = 0; i < pair; i++) score(1, q + i, rows, width, TOKENS, 1, seen, width, scale, weights + i * TOKENS);
            for (int i = 0; i < pair; i++) rescale(states[i], weights + i * TOKENS, latent);
            if (pair == 2) weigh(states, 2, weights, rows, width, count, latent);
            else weigh(states, 1, weights, rows, width, count, latent);
        }
    }
    for (long head = 0; head < heads; head++) {
        scalar *to = a->out + (token * a->heads + begin + head) * latent;
        const float by = factor / STATE(head)->total;
        for (long i = 0; i < latent; i++) to[i] = put(STATE(head)->sum[i] * by);
    }
#undef STATE
}

static void attend_part(const void *given, long piece) {
    const arguments *a = given;
    const long token = piece / a->parts, part = piece % a->parts;
    attend(a, token, a->heads * part / a->parts, a->heads * (part + 1) / a->parts);
}

// q [tokens][heads][width]; tables: a row for each token, table_stride apart, or the same for all if that is 0; lens [tokens]: so many first tokens of the
// context, or of the row of `positions`, are read, at least one; out [tokens][heads][latent]. Strides of the cache are counted in numbers; cache_scale: of an
// FP8 cache, else NULL.
void NAME(latent_attention)(const scalar *q, const void *cache, const int64_t *tables, const int64_t *lens, const int64_t *positions, const float *cache_scale,
                            scalar *out, long tokens, long heads, long latent, long width, long table_stride, long positions_stride, long block_size,
                            long block_stride, long token_stride, float scale, int threads) {
    long parts = 1;
    while (tokens * parts < threads && parts < heads / 2) parts++;
    const arguments a = {q,     cache,  tables, lens,         positions,        cache_scale, out,          tokens,       heads,
                         latent, width, table_stride, positions_stride, block_size, block_stride, token_stride, parts, scale};
    share(attend_part, &a, tokens * parts, threads);
}
