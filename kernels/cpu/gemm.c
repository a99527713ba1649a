// Matrix products of many rows, as prompts bring them, with a large matrix as checkpoints keep it: y[m][n] = x[m] . w[n] + bias[n].
//
// w is packed on its way, a block at a time, which stays in the second-level cache until all rows of x have met it; meanwhile the block behind it is
// fetched. Threads take blocks of outputs, so that nothing one of them writes is read by another. A row's sums are the same in any company.
#include "outputs.h"

#include <pthread.h>
#include <stdlib.h>

// Sums that stay in registers, rows of x times vectors of outputs: 14 broadcasts and 2 loads for 28 multiply-adds, 1.95 of the 2 a cycle that Zen 5
// can do. Packing, fetching and finishing cost the whole product 6 % of that, the activation of a gated one 4 % more.
#define X_TILE (LANES == 16 ? 14 : LANES == 8 ? 6 : 4)
#define VECTORS (LANES == 4 ? 4 : 2)
#define W_TILE (VECTORS * LANES)
#define W_TILES 2                                        // of a block
#define W_BLOCK (W_TILES * W_TILE)
#define SQUARE (LANES * PER_LANE)                        // columns that are packed at a time
#define CHAIN (512 * PER_LANE)                           // columns that are added one to another: longer sums would lose what fp32 can hold
#define DEPTH (8192 / (long)sizeof(packed))              // columns of a block at most: 512 KiB
#define MOST_TILES 74                                    // of x for each block; where columns take several blocks, their sums are 260 KiB
#define X_ROWS (MOST_TILES * X_TILE)
#define CACHE_LINE 64

INLINE long whole_squares(long columns) { return (columns + SQUARE - 1) / SQUARE * SQUARE; }

// to[i][lane] = rows[lane][i * PER_LANE ..]: lines of `line`, zeros behind the last column up to a whole square.
INLINE void pack(const scalar *const *rows, long columns, packed *to, long line) {
    long k = 0;
    for (; k + SQUARE <= columns; k += SQUARE) pack_square(rows, k, to + k / PER_LANE * line, line);
    if (k == columns) return;
    scalar padded[LANES][SQUARE];
    const scalar *ends[LANES];
    memset(padded, 0, sizeof padded);
    for (long lane = 0; lane < LANES; lane++) {
        memcpy(padded[lane], rows[lane] + k, (columns - k) * sizeof(scalar));
        ends[lane] = padded[lane];
    }
    pack_square(ends, 0, to + k / PER_LANE * line, line);
}

// sums [rows][W_TILE] = or += x . w; x [depth / PER_LANE][LANES][PER_LANE], w [depth / PER_LANE][W_TILE][PER_LANE].
INLINE void tile(const int rows, const packed *x, const packed *w, long depth, int goes_on, float *sums) {
    for (const packed *last = w + depth * W_TILE; w < last; goes_on = 1) {
        lanes sum[X_TILE * VECTORS];
        for (int i = 0; i < rows * VECTORS; i++) sum[i] = all(0);
        for (const packed *end = last - w < CHAIN * W_TILE ? last : w + CHAIN * W_TILE; w < end; x += SQUARE, w += VECTORS * SQUARE) {
            piece columns[VECTORS];
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) columns[n] = load_packed(w + n * SQUARE);
#pragma GCC unroll 14
            for (int m = 0; m < rows; m++) {
                piece row = repeated(x + m * PER_LANE);
#pragma GCC unroll 4
                for (int n = 0; n < VECTORS; n++) sum[m * VECTORS + n] = multiply_add(sum[m * VECTORS + n], columns[n], row);
            }
        }
        for (int i = 0; i < rows * VECTORS; i++) store_f32(sums + i * LANES, goes_on ? load_f32(sums + i * LANES) + sum[i] : sum[i]);
    }
}

static void multiply(long rows, const packed *x, const packed *w, long depth, int goes_on, float *sums) {
#define ROWS(m) \
    case m: tile(m, x, w, depth, goes_on, sums); break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if LANES > 4
        ROWS(5) ROWS(6)
#endif
#if LANES > 8
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
#endif
    }
#undef ROWS
}

typedef struct {
    const scalar *x, *w, *bias;
    packed *packed_x;  // [tiles][depth / PER_LANE][LANES][PER_LANE]
    char *y;
    long rows, tiles, outputs, columns, x_stride;
    int activation, wide_output;
} arguments;

// The rows of x are spread evenly over the tiles.
INLINE long tile_begin(const arguments *a, long i) { return i * a->rows / a->tiles; }

INLINE packed *tile_of_x(const arguments *a, long i, long column) { return a->packed_x + (i * whole_squares(a->columns) + column) * LANES; }

static void pack_tile_of_x(const void *given, long i) {
    const arguments *a = given;
    const scalar *rows[LANES];
    for (long lane = 0; lane < LANES; lane++) {
        const long row = tile_begin(a, i) + lane;
        rows[lane] = a->x + (row < a->rows ? row : a->rows - 1) * a->x_stride;  // lanes behind the tile's rows are not used
    }
    pack(rows, a->columns, tile_of_x(a, i, 0), SQUARE);
}

// Row `index` of a block of w. With an activation the first half of a tile are gates, the second half their ups.
INLINE const scalar *row_of_w(const arguments *a, long block, long index) {
    const long tile = block * W_TILES + index / W_TILE, row = index % W_TILE;
    const long part = a->activation ? W_TILE / 2 : W_TILE, output = tile * part + row % part;
    return a->w + (row / part * a->outputs + (output < a->outputs ? output : a->outputs - 1)) * a->columns;
}

INLINE long depth_at(const arguments *a, long column) { return a->columns - column < DEPTH ? a->columns - column : DEPTH; }

static void pack_block_of_w(const arguments *a, long block, long column, packed *w) {
    const long depth = depth_at(a, column);
    for (long first = 0; first < W_BLOCK; first += LANES) {
        const scalar *rows[LANES];
        for (long lane = 0; lane < LANES; lane++) rows[lane] = row_of_w(a, block, first + lane) + column;
        pack(rows, depth, w + first / W_TILE * W_TILE * whole_squares(depth) + first % W_TILE * PER_LANE, W_TILE * PER_LANE);
    }
}

// The block of w that this thread takes next, likely, fetched some lines at a time.
typedef struct {
    long block, column, row;
    const char *line, *end;
} ahead;

static void fetch(const arguments *a, ahead *next, long lines) {
    for (; lines; lines--, next->line += CACHE_LINE) {
        if (next->line >= next->end) {
            if (next->row == W_BLOCK) return;
            const scalar *row = row_of_w(a, next->block, next->row++) + next->column;
            next->line = (const char *)row;
            next->end = (const char *)(row + depth_at(a, next->column));
        }
        __builtin_prefetch(next->line, 0, 2);
    }
}

static void multiply_block(const void *given, long block) {
    const arguments *a = given;
    const long deepest = depth_at(a, 0), is_in_parts = a->columns > DEPTH;
    const long per_tile = a->activation ? W_TILE / 2 : W_TILE, first = block * W_TILES * per_tile;
    const long left = (a->outputs - first + per_tile - 1) / per_tile, w_tiles = left < W_TILES ? left : W_TILES;
    packed w[W_BLOCK * whole_squares(deepest)] __attribute__((aligned(CACHE_LINE)));
    float sums[(is_in_parts ? a->tiles * W_TILES : 1) * X_TILE * W_TILE] __attribute__((aligned(CACHE_LINE)));
    const long lines = 1 + W_BLOCK * deepest * (long)sizeof(scalar) / CACHE_LINE / (a->tiles * w_tiles);  // that are fetched with each tile
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    for (long column = 0; column < a->columns; column += DEPTH) {
        const long padded = whole_squares(depth_at(a, column));
        const int is_last = column + DEPTH >= a->columns;
        ahead next = {is_last ? block + 1 : block, is_last ? 0 : column + DEPTH, 0, NULL, NULL};
        pack_block_of_w(a, block, column, w);
        for (long i = 0; i < a->tiles; i++) {
            const long top = tile_begin(a, i), rows = tile_begin(a, i + 1) - top;
            for (long j = 0; j < w_tiles; j++) {
                float *of_tile = sums + (is_in_parts ? i * W_TILES + j : 0) * X_TILE * W_TILE;
                fetch(a, &next, lines);
                multiply(rows, tile_of_x(a, i, column), w + j * W_TILE * padded, padded, column > 0, of_tile);
                if (!is_last) continue;
                const long begin = first + j * per_tile, count = a->outputs - begin < per_tile ? a->outputs - begin : per_tile;
                for (long m = 0; m < rows; m++)
                    finish(of_tile + m * W_TILE, W_TILE / 2, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                           a->y + ((top + m) * a->outputs + begin) * size);
            }
        }
    }
}

// Scratch memory of the calling thread, kept until it ends: to get 5 MB of pages anew takes the system longer than to pack x takes here.
typedef struct {
    _Alignas(CACHE_LINE) size_t size;
} scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static int has_scratch;

static void make_scratch_key(void) { has_scratch = !pthread_key_create(&scratch_key, free); }

static void *scratch_of(size_t size) {
    pthread_once(&scratch_once, make_scratch_key);
    if (!has_scratch) return NULL;
    scratch *mine = pthread_getspecific(scratch_key);
    if (mine && mine->size >= size) return mine + 1;
    free(mine);
    mine = aligned_alloc(CACHE_LINE, sizeof *mine + size);
    if (mine) mine->size = size;
    if (pthread_setspecific(scratch_key, mine)) {
        free(mine);
        return NULL;
    }
    return mine ? mine + 1 : NULL;
}

void NAME(linear)(const scalar *x, const scalar *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation,
                  int wide_output, int threads);

// Whether many rows should come here. In bf16 only with an instruction for its products, and not where there are matrix units: oneDNN uses those.
#if !defined(SCALAR_BF16) || (defined(WIDE) && defined(__AVX512BF16__) && !defined(__AMX_BF16__))
const int NAME(gemm_is_fast) = 1;
#else
const int NAME(gemm_is_fast) = 0;
#endif

// What `linear` computes, for more rows.
void NAME(gemm)(const scalar *x, const scalar *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation,
                int wide_output, int threads) {
    const long most = rows < X_ROWS ? rows : X_ROWS, blocks = (outputs * (activation ? 2 : 1) + W_BLOCK - 1) / W_BLOCK;
    packed *packed_x = scratch_of((most + X_TILE - 1) / X_TILE * whole_squares(columns) * LANES * sizeof(packed));
    if (!packed_x) {  // slower, without memory
        NAME(linear)(x, w, bias, y, rows, outputs, columns, x_stride, activation, wide_output, threads);
        return;
    }
    for (long top = 0; top < rows; top += X_ROWS) {
        const long count = rows - top < X_ROWS ? rows - top : X_ROWS;
        char *into = (char *)y + top * outputs * (wide_output ? sizeof(float) : sizeof(scalar));
        const arguments a = {x + top * x_stride, w,       bias,    packed_x, into,       count,
                             (count + X_TILE - 1) / X_TILE, outputs, columns, x_stride, activation, wide_output};
        share(pack_tile_of_x, &a, a.tiles, threads);
        share(multiply_block, &a, blocks, threads);
    }
}
