// Causal attention of prompt chunks over the paged cache: both products go through packed tiles of 64 keys and their values, so that a multiply-add
// serves a whole vector of keys and nothing is summed across lanes.
//
// A thread takes some 64 rows (the queries of one key-value head, several tokens of them) through all tiles they may look at. Tiles are counted from
// position 0, so a row meets the same ones in the same order however its prompt was cut into chunks.
#include "fp8.h"
#include "tiles.h"

#define KEYS 64  // of a tile
#define ROWS 128 // that share a tile, about
#define ROW_TILE (LANES == 16 ? 4 : 2)
#define VECTORS 4

// sums[m][n] = factors[m] * sums[m][n] + a[m] . b[n]; a [rows][depth], b [depth / PER_LANE][vectors of keys or values].
INLINE void tile(const int rows, const int vectors, const packed *a, long a_stride, const packed *b, long b_stride, long depth, const float *factors,
                 float *sums, long sums_stride) {
    lanes sum[ROW_TILE * VECTORS];
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vectors; n++)
            sum[m * vectors + n] = factors ? factors[m] * load_f32(sums + m * sums_stride + n * LANES) : all(0);
    for (long k = 0; k < depth; k += PER_LANE, b += b_stride) {
        piece columns[VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) columns[n] = load_packed(b + n * LANES * PER_LANE);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            piece row = repeated(a + m * a_stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++) sum[m * vectors + n] = multiply_add(sum[m * vectors + n], columns[n], row);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vectors; n++) store_f32(sums + m * sums_stride + n * LANES, sum[m * vectors + n]);
}

#ifdef MATRIX_TILES
#define ROWS_TOGETHER (has_tiles ? TILE_LINES : ROW_TILE)
#define DEPTH_STEP TILE_COLUMNS

// Sixteen rows times `count` vectors of b, as `multiply` has them, whose sums stay in tiles.
INLINE void block(const int count, const packed *a, long a_stride, const packed *b, long b_stride, long depth, int goes_on, float *sums,
                  long sums_stride) {
    const long a_bytes = a_stride * sizeof *a, b_bytes = b_stride * sizeof *b, sums_bytes = sums_stride * sizeof *sums;
    if (goes_on) {
        load_tile(0, sums, sums_bytes);
        if (count > 1) load_tile(1, sums + LANES, sums_bytes);
        if (count > 2) load_tile(2, sums + 2 * LANES, sums_bytes);
        if (count > 3) load_tile(3, sums + 3 * LANES, sums_bytes);
    } else {
        clear_tile(0);
        clear_tile(1);
        clear_tile(2);
        clear_tile(3);
    }
    for (long k = 0; k < depth; k += TILE_COLUMNS, a += TILE_COLUMNS, b += TILE_LINES * b_stride) {
        load_tile(4, a, a_bytes);
        load_tile(5, b, b_bytes);
        multiply_tiles(0, 4, 5);
        if (count > 1) load_tile(6, b + LANES * PER_LANE, b_bytes);
        if (count > 1) multiply_tiles(1, 4, 6);
        if (count > 2) load_tile(7, b + 2 * LANES * PER_LANE, b_bytes);
        if (count > 2) multiply_tiles(2, 4, 7);
        if (count > 3) load_tile(5, b + 3 * LANES * PER_LANE, b_bytes);
        if (count > 3) multiply_tiles(3, 4, 5);
    }
    store_tile(0, sums, sums_bytes);
    if (count > 1) store_tile(1, sums + LANES, sums_bytes);
    if (count > 2) store_tile(2, sums + 2 * LANES, sums_bytes);
    if (count > 3) store_tile(3, sums + 3 * LANES, sums_bytes);
}

// As `multiply`, by tiles: of sixteen rows, of which those behind `rows` are not used.
static void multiply_by_tiles(long rows, long vectors, const packed *a, long a_stride, const packed *b, long b_stride, long depth,
                              const float *factors, float *sums, long sums_stride) {
    for (long m = 0; factors && m < rows; m++)
        for (long n = 0; n < vectors && factors[m] != 1; n++)
            store_f32(sums + m * sums_stride + n * LANES, factors[m] * load_f32(sums + m * sums_stride + n * LANES));
#define BLOCK(count) block(count, a, a_stride, b + n * LANES * PER_LANE, b_stride, depth, factors != NULL, sums + n * LANES, sums_stride)
    long n = 0;
    for (; n + 4 <= vectors; n += 4) BLOCK(4);
    if (vectors - n == 3) BLOCK(3);
    else if (vectors - n == 2) BLOCK(2);
    else if (vectors - n == 1) BLOCK(1);
#undef BLOCK
}
#else
#define ROWS_TOGETHER ROW_TILE
#define DEPTH_STEP PER_LANE
#endif

static void multiply(long rows, long vectors, const packed *a, long a_stride, const packed *b, long b_stride, long depth, const float *factors,
                     float *sums, long sums_stride) {
#ifdef MATRIX_TILES
    if (has_tiles) {
        multiply_by_tiles(rows, vectors, a, a_stride, b, b_stride, depth, factors, sums, sums_stride);
        return;
    }
#endif
    long n = 0;
#define TILE(m, v) tile(m, v, a, a_stride, b + n * LANES * PER_LANE, b_stride, depth, factors, sums + n * LANES, sums_stride)
    if (rows == ROW_TILE) {
        for (; n + VECTORS <= vectors; n += VECTORS) TILE(ROW_TILE, VECTORS);
        for (; n < vectors; n++) TILE(ROW_TILE, 1);
        return;
    }
    for (long m = 0; m < rows; m++, a += a_stride, sums += sums_stride, factors += factors != NULL) {
        for (n = 0; n + VECTORS <= vectors; n += VECTORS) TILE(1, VECTORS);
        for (; n < vectors; n++) TILE(1, 1);
    }
#undef TILE
}

typedef struct {
    const scalar *q;
    const void *k_cache, *v_cache;
    const int64_t *tables;
    const int32_t *starts, *context_lens;
    const scalar *sinks;
    const float *kv_scales;  // of caches in FP8; else NULL
    scalar *out;
    long seqs, q_stride, max_blocks, heads, kv_heads, head_dim, block_size, block_stride, token_stride, head_stride, window, tile_tokens;
    float scale;
} arguments;

// Of one thread's work, in its own memory; rows are (token, head of the group), tokens first.
typedef struct {
    packed *q, *k, *v, *weights;         // [rows][depth], [depth / PER_LANE][KEYS], [KEYS / PER_LANE][width], [rows][KEYS]
    float *scores, *sums, *most, *total;  // [rows][KEYS], [rows][width], [rows], [rows]
    long rows, depth, width;             // head_dim in whole DEPTH_STEPs, and in whole vectors
} workspace;

// Where the keys or values of a tile lie, those of FP8 in `widened`; NULL for those before `begin` and from `end` on, which no query sees.
static void find_rows(const arguments *g, const void *cache, const int64_t *table, long kv_head, long first, long begin, long end, scalar *widened,
                      const scalar **rows) {
    for (long t = 0; t < KEYS; t++) {
        const long token = first + t;
        if (token < begin || token >= end) {
            rows[t] = NULL;
            continue;
        }
        const long at = table[token / g->block_size] * g->block_stride + token % g->block_size * g->token_stride + kv_head * g->head_stride;
        if (g->kv_scales) widen_fp8((const uint8_t *)cache + at, widened + t * g->head_dim, g->head_dim);
        rows[t] = g->kv_scales ? widened + t * g->head_dim : (const scalar *)cache + at;
    }
}

static int are_there(const scalar *const *rows, long count) {
    int are = 1;
    for (long i = 0; i < count; i++) are &= rows[i] != NULL;
    return are;
}

// k[i / PER_LANE][t][i % PER_LANE] = rows[t][i]; zeros where there is none.
static void pack_keys(const scalar *const *rows, long head_dim, long depth, packed *k) {
    for (long t = 0; t < KEYS; t += LANES) {
        long i = 0;
        if (are_there(rows + t, LANES))
            for (; i + LANES * PER_LANE <= head_dim; i += LANES * PER_LANE)
                pack_square(rows + t, i, k + (i / PER_LANE * KEYS + t) * PER_LANE, KEYS * PER_LANE);
        for (; i < depth; i += PER_LANE)
            for (long lane = t; lane < t + LANES; lane++)
                for (long j = 0; j < PER_LANE; j++)
                    k[(i / PER_LANE * KEYS + lane) * PER_LANE + j] = rows[lane] && i + j < head_dim ? to_packed(rows[lane][i + j]) : 0;
    }
}

// v[t / PER_LANE][i][t % PER_LANE] = rows[t][i]; zeros where there is none.
static void pack_values(const scalar *const *rows, long head_dim, long width, packed *v) {
    for (long t = 0; t < KEYS; t += PER_LANE, v += width * PER_LANE) {
        long i = 0;
        if (are_there(rows + t, PER_LANE))
            for (; i + LANES <= head_dim; i += LANES) pack_rows(rows + t, i, v + i * PER_LANE);
        for (; i < width; i++)
            for (long j = 0; j < PER_LANE; j++) v[i * PER_LANE + j] = rows[t + j] && i < head_dim ? to_packed(rows[t + j][i]) : 0;
    }
}

// Turns a row's scores of keys begin .. end (of `vectors`; the others are not seen) into weights against the row's largest so far.
INLINE float weigh(const float *scores, packed *weights, const int vectors, long begin, long end, const int is_whole, float scale, float *most,
                   float *total) {
    lanes score[KEYS / LANES], largest = all(-INFINITY);
    for (int n = 0; n < vectors; n++) {
        score[n] = load_f32(scores + n * LANES) * scale;
        if (!is_whole) score[n] = only_between(score[n], begin - n * LANES, end - n * LANES);
        largest = larger_of(score[n], largest);
    }
    const float top = max_of(largest), before = *most, now = top > before ? top : before;
    const float base = now == -INFINITY ? 0 : now;  // a row that has seen nothing yet
    lanes sum = all(0);
    for (int n = 0; n < vectors; n++) {
        const lanes weight = exp_of(score[n] - base);
        sum += weight;
        store_packed(weights + n * LANES, weight);
    }
    const float factor = first_of(exp_of(all(before - base)));
    *most = now;
    *total = *total * factor + sum_of(sum);
    return factor;
}

// One tile of keys and values for all rows; rows [group] of token i see positions up to `position + i`.
static void attend_tile(const arguments *g, const workspace *w, long first, long position) {
    const long group = g->heads / g->kv_heads;
    const long together = ROWS_TOGETHER, key_step = has_tiles ? 2 * LANES : LANES;
    for (long row = 0; row < w->rows; row += together) {
        const long rows = w->rows - row < together ? w->rows - row : together;
        const long last = position + (row + rows - 1) / group;  // what the last of these rows sees
        long keys = last + 1 - first < KEYS ? last + 1 - first : KEYS;
        if (keys <= 0) continue;
        keys = (keys + key_step - 1) / key_step * key_step;
        float factors[ROWS_TOGETHER], *scores = w->scores + row * KEYS;
        packed *weights = w->weights + row * KEYS;
        multiply(rows, keys / LANES, w->q + row * w->depth, w->depth, w->k, KEYS * PER_LANE, w->depth, NULL, scores, KEYS);
        for (long m = 0; m < rows; m++) {
            const long seen = position + (row + m) / group + 1;
            const long begin = g->window && seen - g->window > first ? seen - g->window - first : 0;
#define WEIGH(vectors, is_whole) \
    weigh(scores + m * KEYS, weights + m * KEYS, vectors, begin, seen - first, is_whole, g->scale, w->most + row + m, w->total + row + m)
            factors[m] = keys == KEYS && !begin && seen - first >= KEYS ? WEIGH(KEYS / LANES, 1) : WEIGH(keys / LANES, 0);
#undef WEIGH
        }
        multiply(rows, w->width / LANES, weights, KEYS, w->v, w->width * PER_LANE, keys, factors, w->sums + row * w->width, w->width);
    }
}

// Tokens begin .. end of a sequence's chunk, for the query heads of one key-value head; all tokens of the context up to `position + i` may be seen.
static void attend(const arguments *g, const int64_t *table, const scalar *q, scalar *out, long tokens, long position, long kv_head) {
    const long group = g->heads / g->kv_heads, rows = tokens * group, head_dim = g->head_dim;
    const long depth = (head_dim + DEPTH_STEP - 1) / DEPTH_STEP * DEPTH_STEP, width = (head_dim + LANES - 1) / LANES * LANES;
    const long whole = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;  // what tiles read and write
    packed packed_q[whole * depth] __attribute__((aligned(64))), k[KEYS * depth] __attribute__((aligned(64)));
    packed v[KEYS * width] __attribute__((aligned(64))), weights[whole * KEYS] __attribute__((aligned(64)));
    float scores[whole * KEYS] __attribute__((aligned(64))), sums[whole * width] __attribute__((aligned(64))), most[rows], total[rows];
    scalar widened[g->kv_scales ? KEYS * head_dim : 1] __attribute__((aligned(64)));
    const workspace w = {packed_q, k, v, weights, scores, sums, most, total, rows, depth, width};
    memset(sums, 0, sizeof sums);
    for (long row = 0; row < rows; row++) {
        const long head = kv_head * group + row % group;
        const scalar *from = q + row / group * g->q_stride + head * head_dim;
        for (long i = 0; i < depth; i++) packed_q[row * depth + i] = i < head_dim ? to_packed(from[i]) : 0;
        most[row] = g->sinks ? get(g->sinks[head]) : -INFINITY;
        total[row] = g->sinks ? 1.0f : 0.0f;
    }
    const long end = position + tokens;
    const long begin = g->window && position + 1 > g->window ? position + 1 - g->window : 0;
    begin_tiles();
    for (long first = begin - begin % KEYS; first < end; first += KEYS) {
        const scalar *cached[KEYS];
        find_rows(g, g->k_cache, table, kv_head, first, begin, end, widened, cached);
        pack_keys(cached, head_dim, depth, k);
        find_rows(g, g->v_cache, table, kv_head, first, begin, end, widened, cached);
        pack_values(cached, head_dim, width, v);
        attend_tile(g, &w, first, position);
    }
    end_tiles();
    for (long row = 0; row < rows; row++) {
        scalar *to = out + (row / group * g->heads + kv_head * group + row % group) * head_dim;
        const float factor = (g->kv_scales ? g->kv_scales[1] : 1.0f) / total[row];
        long i = 0;
        for (; i + LANES <= head_dim; i += LANES) store(to + i, load_f32(sums + row * width + i) * factor);
        for (; i < head_dim; i++) to[i] = put(sums[row * width + i] * factor);
    }
}

// A piece is one key-value head of `tile_tokens` tokens of one sequence; the last tokens, which look at the most keys, come first.
static void attend_piece(const void *given, long piece) {
    const arguments *a = given;
    const long kv_head = piece % a->kv_heads;
    long tile = piece / a->kv_heads, seq = 0;
    for (;; seq++) {
        const long tiles = (a->starts[seq + 1] - a->starts[seq] + a->tile_tokens - 1) / a->tile_tokens;
        if (tile < tiles) {
            tile = tiles - 1 - tile;
            break;
        }
        tile -= tiles;
    }
    const long start = a->starts[seq], q_len = a->starts[seq + 1] - start, begin = tile * a->tile_tokens;
    const long tokens = q_len - begin < a->tile_tokens ? q_len - begin : a->tile_tokens;
    attend(a, a->tables + seq * a->max_blocks, a->q + (start + begin) * a->q_stride, a->out + (start + begin) * a->heads * a->head_dim, tokens,
           a->context_lens[seq] - q_len + begin, kv_head);
}

// q [tokens][heads][head_dim], q_stride scalars between tokens, sequences back to back from starts[seq]; tables [seqs][max_blocks]; context_lens [seqs]
// count the chunk; window 0: all of the context; sinks [heads] or NULL; out [tokens][heads][head_dim]. Strides of the caches are counted in numbers.
// kv_scales: of caches in FP8, what a stored key and a stored value are multiplied by; else NULL.
void NAME(prefill_attention)(const scalar *q, const void *k_cache, const void *v_cache, const int64_t *tables, const int32_t *starts,
                             const int32_t *context_lens, const scalar *sinks, scalar *out, long seqs, long q_stride, long max_blocks, long heads,
                             long kv_heads, long head_dim, long block_size, long block_stride, long token_stride, long head_stride, long window, float scale,
                             const float *kv_scales, int threads) {
    const long group = heads / kv_heads, tile_tokens = ROWS / group > 0 ? ROWS / group : 1;
    const arguments a = {q,        k_cache,    v_cache, tables,   starts,   context_lens, sinks,        kv_scales, out,          seqs,        q_stride,
                         max_blocks, heads,   kv_heads, head_dim, block_size,   block_stride, token_stride, head_stride, window,   tile_tokens,
                         kv_scales ? scale * kv_scales[0] : scale};
    long tiles = 0;
    for (long seq = 0; seq < seqs; seq++) tiles += (starts[seq + 1] - starts[seq] + tile_tokens - 1) / tile_tokens;
    share(attend_piece, &a, tiles * kv_heads, threads);
}
