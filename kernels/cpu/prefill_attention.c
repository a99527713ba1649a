// Causal attention of prompt chunks over the paged cache. Each lane of a vector has another query. So the largest scores, the sums of weights and the
// factors of earlier sums are vectors, nothing is summed or compared across lanes, and keys are multiplied in the layout of the cache.
//
// A thread takes some rows (the queries of several tokens for one key-value head) through tiles of keys and values, which it copies. Tiles are counted
// from position 0, so a row is computed with the same tiles in the same order, however its prompt is divided into chunks.
#include "fp8.h"
#include "packing.h"
#include "tiles.h"

#define KEYS 128                      // keys of a tile
#define VECTORS 2                     // vectors of rows that are computed with a tile together: all data fit in the first-level cache
#define PANEL (VECTORS * LANES)       // rows in these vectors
#define SUMS (LANES == 16 ? 16 : 8)  // sums that stay in registers
#define LOG2_E 1.44269504f
#define PIECE_FLOATS (64 << 10)       // most sums of a piece
#define PIECES_PER_THREAD 4
#define LEAST_ROWS 128

// sums[m][n] = factors[n] * sums[m][n] + a[m] . b[n]; a [rows][depth], b [depth / PER_LANE][PANEL][PER_LANE], sums [rows][PANEL], for the first vectors of
// the panel. Without factors earlier sums are ignored.
INLINE void tile(const int rows, const int vectors, const packed *a, long a_stride, const packed *b, long depth, const float *factors, float *sums) {
    lanes sum[SUMS];
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vectors; n++)
            sum[m * vectors + n] = factors ? load_f32(factors + n * LANES) * load_f32(sums + m * PANEL + n * LANES) : all(0);
    for (long k = 0; k < depth; k += PER_LANE, b += PANEL * PER_LANE) {
        piece columns[VECTORS];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) columns[n] = load_packed(b + n * LANES * PER_LANE);
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const piece row = repeated(a + m * a_stride + k);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; n++) sum[m * vectors + n] = multiply_add(sum[m * vectors + n], columns[n], row);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vectors; n++) store_f32(sums + m * PANEL + n * LANES, sum[m * vectors + n]);
}

#ifdef MATRIX_TILES
// The same with matrix tiles.
static void multiply_by_tiles(long rows, long vectors, const packed *a, long a_stride, const packed *b, long depth, const float *factors, float *sums) {
    for (long n = 0; factors && n < vectors; n++) {
        const lanes factor = load_f32(factors + n * LANES);
        for (long m = 0; m < rows && !are_all(factor, 1); m++) store_f32(sums + m * PANEL + n * LANES, factor * load_f32(sums + m * PANEL + n * LANES));
    }
    for (long m = 0; m < rows; m += 2 * TILE_LINES, a += 2 * TILE_LINES * a_stride, sums += 2 * TILE_LINES * PANEL) {
        const band bands[2] = {{a, a_stride}, {a + TILE_LINES * a_stride, a_stride}};
#define BLOCK(num_bands, num_vectors) multiply_bands(num_bands, num_vectors, bands, b, PANEL, depth, factors != NULL, sums)
        if (rows - m > TILE_LINES && vectors > 1) BLOCK(2, 2);
        else if (rows - m > TILE_LINES) BLOCK(2, 1);
        else if (vectors > 1) BLOCK(1, 2);
        else BLOCK(1, 1);
#undef BLOCK
    }
}
#endif

// As `tile`; rows are a multiple of SUMS and, with matrix tiles, depth is a multiple of TILE_COLUMNS.
static void multiply(long rows, long vectors, const packed *a, long a_stride, const packed *b, long depth, const float *factors, float *sums) {
#ifdef MATRIX_TILES
    if (has_tiles) {
        multiply_by_tiles(rows, vectors, a, a_stride, b, depth, factors, sums);
        return;
    }
#endif
#define TILES(count, together) \
    for (long m = 0; m < rows; m += together) tile(together, count, a + m * a_stride, a_stride, b, depth, factors, sums + m * PANEL)
    if (vectors > 1) TILES(2, SUMS / 2);
    else TILES(1, SUMS);
#undef TILES
}

typedef struct {
    const scalar *q;
    const void *k_cache, *v_cache;
    const int64_t *tables;
    const int32_t *starts, *context_lens;
    const scalar *sinks;
    const float *kv_scales;       // of FP8 caches; else NULL
    const int32_t *last_visible;  // the last position that a token sees, if that is after its own; NULL if no token sees later ones
    scalar *out;
    long seqs, q_stride, max_blocks, heads, kv_heads, head_dim, block_size, block_stride, token_stride, head_stride, window, tile_tokens;
    float scale;
} arguments;

// The rows of one key-value head: a row is a token and a head of the group, tokens first.
typedef struct {
    const arguments *g;
    const int64_t *table;
    long kv_head, group, rows, position;  // position: of the first token
    long begin, end;                      // the positions that any of the rows sees
    const int32_t *last_visible;          // of the first token; or NULL
    long context;
} chunk;

// Returns the position after a row's own.
INLINE long after(const chunk *c, long row) { return c->position + row / c->group + 1; }

// Returns the position after the last one that a row sees. It never decreases from row to row.
INLINE long seen_by(const chunk *c, long row) {
    const long own = after(c, row);
    if (!c->last_visible) return own;
    const long last = c->last_visible[row / c->group] + 1L, end = last < c->context ? last : c->context;
    return own > end ? own : end;
}

INLINE const void *row_of(const chunk *c, const void *cache, int32_t token) {
    const arguments *g = c->g;
    const int32_t block_size = g->block_size;  // 32 bits, because dividing 64 bits takes as long as copying the row
    const long at = c->table[token / block_size] * g->block_stride + token % block_size * g->token_stride + c->kv_head * g->head_stride;
    return (const char *)cache + at * (g->kv_scales ? 1 : (long)sizeof(scalar));
}

// Copies keys or values of a tile to [KEYS][stride]. A key is followed by zeros, and keys that no row sees are zero. Meanwhile the next tile is fetched.
static void gather(const chunk *c, const void *cache, long first, packed *to, long stride) {
    const arguments *g = c->g;
    const long bytes = g->head_dim * (g->kv_scales ? 1 : sizeof(scalar));
    scalar widened[g->kv_scales ? g->head_dim : 1];
    for (long token = first; token < first + KEYS; token++, to += stride) {
        if (token + KEYS < c->end) {
            const char *next = row_of(c, cache, token + KEYS);
            for (long i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        }
        if (token < c->begin || token >= c->end) {
            memset(to, 0, stride * sizeof *to);
            continue;
        }
        const scalar *from = row_of(c, cache, token);
        if (g->kv_scales) {
            widen_fp8((const uint8_t *)from, widened, g->head_dim);
            from = widened;
        }
        copy_packed(from, g->head_dim, stride, to);
    }
}

// Turns the scores of keys `first` .. `first + keys` into weights relative to the largest score so far, for one vector of rows. Each row sees positions
// from `begin` to `end`; `is_whole`: each sees all of these keys. Scores are overwritten.
INLINE void weigh(float *scores, packed *weights, const int is_whole, long keys, lanes_i32 begin, lanes_i32 end, int32_t first, float scale, float *most,
                  float *total, float *factor) {
    lanes largest[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};  // four independent maxima, because each waits for the previous one
    for (long t = 0; t < keys; t += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            lanes score = load_f32(scores + (t + i) * PANEL);
            if (!is_whole) {
                const int32_t at = first + (int32_t)t + i;
                score = choose_lanes((at >= begin) & (at < end), score, all(-INFINITY));
                store_f32(scores + (t + i) * PANEL, score);
            }
            largest[i] = larger_of(score, largest[i]);
        }
    const lanes top = scale * larger_of(larger_of(largest[0], largest[1]), larger_of(largest[2], largest[3]));
    const lanes before = load_f32(most), now = larger_of(top, before);
    const lanes base = choose_lanes(now == all(-INFINITY), all(0), now);  // for rows that have seen no key yet
    lanes sum[4] = {all(0), all(0), all(0), all(0)};
    for (long t = 0; t < keys; t += 4) {
        lanes weight[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const lanes score = load_f32(scores + (t + i) * PANEL);
            weight[i] = exp2_of(score * scale - base);
            if (!is_whole) weight[i] = choose_lanes(score == all(-INFINITY), all(0), weight[i]);
            sum[i] += weight[i];
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i += PER_LANE) store_together(weights + (t + i) * PANEL, weight + i);
    }
    const lanes decay = exp2_of(before - base);
    store_f32(factor, decay);
    store_f32(most, now);
    store_f32(total, load_f32(total) * decay + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
}

// A panel of rows: its queries [depth / PER_LANE][PANEL][PER_LANE], and its sums.
typedef struct {
    packed *q;
    float *sums, *most, *total;  // [width][PANEL], [PANEL], [PANEL]
} panel_of_rows;

// Computes one tile of keys [KEYS][depth] and values [width][KEYS] for a panel of rows, the first of which is `row`.
static void attend_tile(const chunk *c, const panel_of_rows *p, long row, const packed *k, const packed *v, long depth, long width, long first) {
    const long rows = c->rows - row < PANEL ? c->rows - row : PANEL, vectors = (rows + LANES - 1) / LANES;
    long keys = seen_by(c, row + rows - 1) - first;
    if (keys <= 0) return;
    keys = keys < KEYS ? (keys + 2 * LANES - 1) / (2 * LANES) * (2 * LANES) : KEYS;
    float scores[KEYS * PANEL] __attribute__((aligned(64))), factors[PANEL] __attribute__((aligned(64)));
    packed weights[KEYS * PANEL] __attribute__((aligned(64)));
    multiply(keys, vectors, k, depth, p->q, depth, NULL, scores);
    for (long n = 0; n < rows; n += LANES) {
        const long window = c->g->window ? c->g->window : INT32_MAX, last = row + (rows - n < LANES ? rows : n + LANES) - 1;
        lanes_i32 begin, end;
        for (int i = 0; i < LANES; i++) {
            const long at = row + n + i < c->rows ? row + n + i : row + n;
            begin[i] = after(c, at) - window;
            end[i] = seen_by(c, at);
        }
#define WEIGH(is_whole) \
    weigh(scores + n, weights + n * PER_LANE, is_whole, keys, begin, end, first, c->g->scale, p->most + n, p->total + n, factors + n)
        if (first + keys <= seen_by(c, row + n) && after(c, last) - window <= first) WEIGH(1);
        else WEIGH(0);
#undef WEIGH
    }
    multiply(width, vectors, v, KEYS, weights, keys, factors, p->sums);
}

// Sets a panel's queries, and its sums before the first tile. Lanes after the last row repeat the panel's first row, and are not written.
static void begin_panel(const chunk *c, const scalar *q, long row, const panel_of_rows *p, long width) {
    const arguments *g = c->g;
    memset(p->sums, 0, width * PANEL * sizeof *p->sums);
    for (long n = 0; n < PANEL; n += LANES) {
        const scalar *rows[LANES];
        for (long lane = n; lane < n + LANES; lane++) {
            const long at = row + lane < c->rows ? row + lane : row, head = c->kv_head * c->group + at % c->group;
            rows[lane - n] = q + at / c->group * g->q_stride + head * g->head_dim;
            p->most[lane] = g->sinks ? get(g->sinks[head]) * LOG2_E : -INFINITY;
            p->total[lane] = g->sinks ? 1.0f : 0.0f;
        }
        pack(rows, g->head_dim, p->q + n * PER_LANE, PANEL * PER_LANE);
    }
}

static void end_panel(const chunk *c, scalar *out, long row, const panel_of_rows *p) {
    const arguments *g = c->g;
    const long head_dim = g->head_dim;
    for (long n = 0; n < PANEL && row + n < c->rows; n += LANES) {
        const lanes factor = (g->kv_scales ? g->kv_scales[1] : 1.0f) / load_f32(p->total + n);
        for (long i = 0; i < head_dim; i += LANES) {
            float turned[LANES * LANES], *sums = p->sums + i * PANEL + n;
            for (int j = 0; j < LANES; j++) store_f32(sums + j * PANEL, load_f32(sums + j * PANEL) * factor);
            transpose(sums, PANEL, turned, LANES);
            for (long lane = 0; lane < LANES && row + n + lane < c->rows; lane++) {
                const long at = row + n + lane;
                scalar *to = out + (at / c->group * g->heads + c->kv_head * c->group + at % c->group) * head_dim + i;
                if (i + LANES <= head_dim) store(to, load_f32(turned + lane * LANES));
                else store_part(to, load_f32(turned + lane * LANES), head_dim - i);
            }
        }
    }
}

// Computes a chunk of one sequence for the query heads of one key-value head.
static void attend(const chunk *c, const scalar *q, scalar *out) {
    const long depth = whole_squares(c->g->head_dim), width = (c->g->head_dim + SUMS - 1) / SUMS * SUMS;
    const long panels = (c->rows + PANEL - 1) / PANEL;
    packed all_q[panels * depth * PANEL] __attribute__((aligned(64))), k[KEYS * depth] __attribute__((aligned(64)));
    packed gathered[KEYS * width] __attribute__((aligned(64))), v[width * KEYS] __attribute__((aligned(64)));
    float sums[panels * width * PANEL] __attribute__((aligned(64))), most[panels * PANEL], total[panels * PANEL];
#define PANEL_AT(i) ((panel_of_rows){all_q + (i) * depth * PANEL, sums + (i) * width * PANEL, most + (i) * PANEL, total + (i) * PANEL})
    for (long i = 0; i < panels; i++) begin_panel(c, q, i * PANEL, &PANEL_AT(i), width);
    begin_tiles();
    for (long first = c->begin - c->begin % KEYS; first < c->end; first += KEYS) {
        gather(c, c->g->k_cache, first, k, depth);
        gather(c, c->g->v_cache, first, gathered, width);
        for (long t = 0; t < KEYS; t += SQUARE)
            for (long i = 0; i < width; i += LANES) transpose_packed(gathered + t * width + i, width, v + i * KEYS + t, KEYS);
        for (long i = 0; i < panels; i++) attend_tile(c, &PANEL_AT(i), i * PANEL, k, v, depth, width, first);
    }
    end_tiles();
    for (long i = 0; i < panels; i++) end_panel(c, out, i * PANEL, &PANEL_AT(i));
#undef PANEL_AT
}

// A piece is one key-value head and `tile_tokens` tokens of a sequence. The last tokens, which see the most keys, come first.
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
    const long position = a->context_lens[seq] - q_len + begin;
    chunk c = {a, a->tables + seq * a->max_blocks, kv_head, a->heads / a->kv_heads, tokens * (a->heads / a->kv_heads), position,
               a->window && position + 1 > a->window ? position + 1 - a->window : 0, 0, a->last_visible ? a->last_visible + start + begin : NULL,
               a->context_lens[seq]};
    c.end = seen_by(&c, c.rows - 1);
    attend(&c, a->q + (start + begin) * a->q_stride, a->out + (start + begin) * a->heads * a->head_dim);
}

// q [tokens][heads][head_dim], q_stride scalars between tokens, each sequence's from starts[seq] on; tables [seqs][max_blocks]; context_lens [seqs]
// include the chunk; window: 0 for the whole context; sinks [heads] or NULL; out [tokens][heads][head_dim]. Strides of the caches are counted in numbers.
// kv_scales: for FP8 caches, the factors by which a stored key and a stored value are multiplied; else NULL. last_visible [tokens]: as in VarlenBatch; or
// NULL.
void NAME(prefill_attention)(const scalar *q, const void *k_cache, const void *v_cache, const int64_t *tables, const int32_t *starts,
                             const int32_t *context_lens, const scalar *sinks, scalar *out, long seqs, long q_stride, long max_blocks, long heads,
                             long kv_heads, long head_dim, long block_size, long block_stride, long token_stride, long head_stride, long window, float scale,
                             const float *kv_scales, const int32_t *last_visible, int threads) {
    // Rows of a piece. With more rows, keys and values are copied less often; but all threads should have some pieces, and the sums should stay in the
    // second-level cache.
    const long group = heads / kv_heads, most = PIECE_FLOATS / head_dim, share_of_all = starts[seqs] * heads / (PIECES_PER_THREAD * threads);
    const long rows = share_of_all < LEAST_ROWS ? LEAST_ROWS : share_of_all > most ? most : share_of_all;
    const long tile_tokens = rows > group ? rows / group : 1;
    const arguments a = {q, k_cache, v_cache, tables, starts, context_lens, sinks, kv_scales, last_visible, out, seqs, q_stride, max_blocks, heads, kv_heads,
                         head_dim, block_size, block_stride, token_stride, head_stride, window, tile_tokens,
                         LOG2_E * (kv_scales ? scale * kv_scales[0] : scale)};
    long tiles = 0;
    for (long seq = 0; seq < seqs; seq++) tiles += (starts[seq + 1] - starts[seq] + tile_tokens - 1) / tile_tokens;
    share(attend_piece, &a, tiles * kv_heads, threads);
}
