// Matrix products of several to thousands of rows, as in batches and prompts, with a large weight in the layout of checkpoints: y[m][n] = x[m] . w[n] +
// bias[n].
//
// A vector holds one number of each of several rows of x, which are packed once. w is read in place, two columns (or one) at a time, copied to all lanes.
// So w, which is larger than x if there are few rows, is neither packed nor summed across lanes. Threads take rows of w, so no thread reads results of
// another. A row's sums have the same bits in any batch. If w is coded in 12 bits, its rows are decoded while earlier ones are multiplied (decoding.h). On
// a CPU without bf16 products w is widened, a chain of columns at a time, in the second-level cache: for 512 rows a core with AVX-512 reaches 135 GFLOP/s,
// against 89 if it widens for each product, and 138 in fp32.
//
// Packed x has the layout of tile lines, so matrix tiles (tiles.h) use it, too. They read rows of w in place.
#include "decoding.h"
#include "outputs.h"
#include "packing.h"
#include "program.h"
#include "tiles.h"

// Sums that stay in registers: vectors of rows of x times rows of w. With 16 lanes these are 4 times 6: 4 loads and 6 broadcasts for 24 multiply-adds, of
// which Zen 5 does 2 a cycle. All the rest takes 5 % of the time of a product.
#define VECTORS (LANES == 8 ? 2 : 4)
#define SUMS (LANES == 16 ? 24 : LANES == 8 ? 12 : 16)
// Rows of w in a tile. With one vector they are 12, not 24: rows of 4,096 columns are whole pages apart, and 24 of them do not fit the 12 ways of a
// first-level cache.
#define TILE_ROWS(vectors) (SUMS / ((vectors) == 1 && SUMS == 24 ? 2 : (vectors)))
#define PANEL (VECTORS * LANES)  // rows of x that are multiplied with a unit before the next ones
#ifdef MATRIX_TILES  // half a unit is a whole number of tile blocks; a chain of all panels of x, 1 MiB, stays in the second-level cache
#define UNIT 64
#define PANELS 8
#else
#define UNIT 48   // rows of w that a thread takes; with an activation half are gates and half are ups
#define PANELS 16  // panels of x for each unit; more do not fit in the last-level cache
#endif
// Columns whose products are added up directly: longer sums would lose precision in fp32. One panel of them, 128 KiB, stays in the second-level cache
// while a unit is multiplied.
#define CHAIN (512 * PER_LANE)
#define LINE (64 / (long)sizeof(scalar))  // columns in a cache line of a row of w
// Distance of two decoded rows in columns. If it were CHAIN, stores to one tile's rows would be a whole number of pages from loads of another's, and these
// loads would wait for the unrelated stores.
#define DECODED (CHAIN + LINE)

// The rows that are fetched while a chain is multiplied, `stride` apart. If `in_place`, the later rows of the chain itself come first.
typedef struct {
    const scalar *rows;
    long stride;
    int in_place;
} fetching;

// sums [w_rows][vectors * LANES] = or += w . x, over one chain; x [depth / PER_LANE][vectors][LANES][PER_LANE]. Fetches the rows at `ahead`. If it
// `decodes`, it also decodes as many rows as it multiplies.
INLINE void tile(const int vectors, const int w_rows, const int decodes, const packed *x, const packed *w, long w_stride, long depth,
                 const scalar *ahead, long ahead_stride, int goes_on, decoder *decoder, float *sums) {
    decoded_part parts[SUMS];
    const long num_parts = decodes ? take_parts(decoder, w_rows, parts) : 0, num_first = decodes ? decoder->num_first : 0;
    long step = 0;
    lanes sum[SUMS];
    for (int i = 0; i < w_rows * vectors; i++) sum[i] = all(0);
    long k = 0;
#define COLUMNS(pointer, stride) \
    do { \
        piece rows[VECTORS]; \
        _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) rows[i] = load_packed(x + (k * vectors + i * PER_LANE) * LANES); \
        _Pragma("GCC unroll 24") for (int n = 0; n < w_rows; n++) { \
            const piece columns = repeated(pointer + n * (stride)); \
            _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) \
                sum[n * vectors + i] = multiply_add(sum[n * vectors + i], rows[i], columns); \
        } \
    } while (0)
    while (k + LINE <= depth) {
#pragma GCC unroll 24
        for (int n = 0; n < w_rows; n++) __builtin_prefetch(ahead + n * ahead_stride + k, 0, 2);
        if (decodes) {
            if (num_first) decode_step(decoder->first, num_first, step + STEPS);
            decode_step(parts, num_parts, step++);
        }
        for (const long stop = k + LINE; k < stop; k += PER_LANE) COLUMNS(w + k, w_stride);
    }
    for (; k + PER_LANE <= depth; k += PER_LANE) COLUMNS(w + k, w_stride);
    if (k < depth) {  // the last column has no neighbour
        packed last[SUMS][PER_LANE] = {{0}};
        for (int n = 0; n < w_rows; n++) last[n][0] = w[n * w_stride + k];
        COLUMNS(last[0], PER_LANE);
    }
#undef COLUMNS
    for (int i = 0; i < w_rows * vectors; i++) store_f32(sums + i * LANES, goes_on ? load_f32(sums + i * LANES) + sum[i] : sum[i]);
    if (decodes) finish_parts(parts, num_parts, step), decoder->num_first = 0;
}

// Multiplies all rows of w, tile by tile.
INLINE void tiles_of(const int vectors, const int decodes, const packed *x, const packed *w, long w_rows, long w_stride, long depth, fetching ahead,
                     int goes_on, decoder *decoder, float *sums) {
    long n = 0;
#define TILES(size) \
    for (; n + size <= w_rows; n += size) { \
        const scalar *next = !ahead.in_place ? ahead.rows + n * ahead.stride : n + 2 * size <= w_rows ? (const scalar *)(w + (n + size) * w_stride) : ahead.rows; \
        tile(vectors, size, decodes, x, w + n * w_stride, w_stride, depth, next, ahead.stride, goes_on, decoder, sums + n * vectors * LANES); \
    }
    TILES(TILE_ROWS(vectors))
    TILES(TILE_ROWS(vectors) / 2)
    TILES(1)
#undef TILES
}

#ifdef MATRIX_TILES
// Returns sixteen rows from w on. If there are fewer `rows`, they are copied and followed by zeros.
static band band_of(const scalar *w, long rows, long w_stride, long depth, scalar *copy) {
    if (rows >= TILE_LINES) return (band){w, w_stride};
    memset(copy, 0, TILE_LINES * CHAIN * sizeof *copy);
    for (long n = 0; n < rows; n++) memcpy(copy + n * CHAIN, w + n * w_stride, depth * sizeof *w);
    return (band){copy, CHAIN};
}

// As `multiply`, by tiles; coded rows have been decoded. Nothing is fetched ahead: on Emerald Rapids fetching made products of 512 rows 10 % slower.
static void multiply_by_tiles(long vectors, const packed *x, const scalar *w, long w_rows, long w_stride, long depth, int goes_on, float *sums) {
    scalar copies[2][TILE_LINES * CHAIN] __attribute__((aligned(64)));
    for (long n = 0; n < w_rows; n += 2 * TILE_LINES) {
        const long left = w_rows - n, bands = left > TILE_LINES ? 2 : 1;
        const band rows[2] = {band_of(w + n * w_stride, left, w_stride, depth, copies[0]),
                              bands > 1 ? band_of(w + (n + TILE_LINES) * w_stride, left - TILE_LINES, w_stride, depth, copies[1]) : (band){0}};
        for (long i = 0; i < vectors; i += 2) {
            const packed *from = x + i * LANES * PER_LANE;
            float *into = sums + (n * vectors + i) * LANES;
#define BLOCK(bands, vectors_of_block) multiply_bands(bands, vectors_of_block, rows, from, vectors * LANES, depth, goes_on, into)
            if (bands > 1 && i + 1 < vectors) BLOCK(2, 2);
            else if (bands > 1) BLOCK(2, 1);
            else if (i + 1 < vectors) BLOCK(1, 2);
            else BLOCK(1, 1);
#undef BLOCK
        }
    }
}
#endif

static void multiply(long vectors, const packed *x, const packed *w, long w_rows, long w_stride, long depth, fetching ahead, int goes_on,
                     decoder *decoder, float *sums) {
#ifdef MATRIX_TILES
    if (has_tiles) {
        multiply_by_tiles(vectors, x, w, w_rows, w_stride, depth, goes_on, sums);
        return;
    }
#endif
    switch (vectors) {
#define CASE(count) \
    case count: \
        if (decoder) tiles_of(count, 1, x, w, w_rows, w_stride, depth, ahead, goes_on, decoder, sums); \
        else tiles_of(count, 0, x, w, w_rows, w_stride, depth, ahead, goes_on, NULL, sums); \
        break;
        CASE(1) CASE(2)
#if LANES != 8
        CASE(3) CASE(4)
#endif
#undef CASE
    }
}

typedef struct {
    const scalar *x, *w, *bias;
    coded coded;        // instead of w
    packed *packed_x;  // [panels][columns / PER_LANE][vectors][LANES][PER_LANE]
    char *y;
    long rows, vectors, panels, outputs, columns, padded, x_stride;
    int activation, wide_output;
} arguments;

// Returns the panel's first vector: vectors of rows are spread evenly over the panels.
INLINE long first_vector(const arguments *a, long panel) { return panel * a->vectors / a->panels; }

static void pack_vector(const void *given, long vector) {
    const arguments *a = given;
    long panel = 0;
    while (first_vector(a, panel + 1) <= vector) panel++;
    const long first = first_vector(a, panel), vectors = first_vector(a, panel + 1) - first;
    packed *to = a->packed_x + (first * a->padded + (vector - first) * PER_LANE) * LANES;
    const scalar *rows[LANES];
    for (long lane = 0; lane < LANES; lane++) {
        const long row = vector * LANES + lane;
        rows[lane] = a->x + (row < a->rows ? row : a->rows - 1) * a->x_stride;  // lanes after the last row repeat it; their sums are not used
    }
    pack(rows, a->columns, to, vectors * SQUARE);
}

// Multiplies one chain of a unit, from `column` on, with a panel; sums [rows][vectors * LANES]. `made` has the chain if w is coded or widened. During
// the first panel the `decoder` decodes the next chain.
static void multiply_chain(const arguments *a, long begin, long count, long column, long panel, const packed *made, decoder *decoder, float *sums) {
    const long per_unit = UNIT / (a->activation ? 2 : 1), depth = a->columns - column < CHAIN ? a->columns - column : CHAIN;
    const long first = first_vector(a, panel), vectors = first_vector(a, panel + 1) - first;
    const int is_last = column + CHAIN >= a->columns;
    const packed *x = a->packed_x + (first * a->padded + vectors * column) * LANES;
    for (int part = 0; part < 1 + (a->activation != 0); part++) {
        const long row = begin + part * a->outputs;
        // The rows that this thread probably needs next. Fetches after the end of w have no effect.
        const long next_row = is_last ? row + count : row, next_column = is_last ? 0 : column + CHAIN;
        float *into = sums + part * per_unit * vectors * LANES;
        if (made) {
            const fetching ahead = a->coded.codes ? (fetching){(const scalar *)codes_at(&a->coded, next_row, next_column), a->coded.row_bytes / (long)sizeof(scalar), 0}
                                                  : (fetching){a->w + next_row * a->columns + next_column, a->columns, 0};
            multiply(vectors, x, made + part * per_unit * DECODED, count, DECODED, depth, ahead, column > 0, panel ? NULL : decoder, into);
        } else {
            const scalar *w = a->w + row * a->columns + column, *next = a->w + next_row * a->columns + next_column;
            const fetching ahead = {a->activation && !part ? w + a->outputs * a->columns : next, a->columns, 1};
            multiply(vectors, x, (const packed *)w, count, a->columns, depth, ahead, column > 0, NULL, into);
        }
    }
}

// Widens one chain of a unit, in rows DECODED columns apart.
static void widen_chain(const arguments *a, long begin, long count, long column, packed *to) {
    const long per_unit = UNIT / (a->activation ? 2 : 1), depth = a->columns - column < CHAIN ? a->columns - column : CHAIN;
    for (long part = 0; part < 1 + (a->activation != 0); part++)
        for (long n = 0; n < count; n++)
            copy_packed(a->w + (begin + part * a->outputs + n) * a->columns + column, depth, depth, to + (part * per_unit + n) * DECODED);
}

// Computes the outputs of a unit. With an activation half of its rows are gates, and the other half the corresponding ups.
static void multiply_unit(const void *given, long unit) {
    const arguments *a = given;
    const long per_unit = UNIT / (a->activation ? 2 : 1), begin = unit * per_unit;
    const long count = a->outputs - begin < per_unit ? a->outputs - begin : per_unit;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    float sums[PANELS][UNIT * PANEL] __attribute__((aligned(64))), turned[LANES * UNIT + LANES] __attribute__((aligned(64)));
    packed made[IS_WIDENED ? 1 : 2][UNIT * DECODED] __attribute__((aligned(64)));  // decoded or widened chains: this one, and one that is decoded meanwhile
    const int is_coded = a->coded.codes != NULL, is_hidden = is_coded && !has_tiles && !IS_WIDENED;
    coded_row rows[UNIT];
    decoder decoder = {.rows = rows, .columns = a->columns, .chain = CHAIN, .to_other = is_hidden ? UNIT * DECODED : 0};
    if (is_coded) {
        for (long part = 0; part < 1 + (a->activation != 0); part++) {
            const long row = begin + part * a->outputs;
            for (long n = 0; n < count; n++) rows[decoder.num_rows++] = coded_row_at(&a->coded, row + n, made[0] + (part * per_unit + n) * DECODED);
            if (begin + per_unit < a->outputs) fetch_coded_rows(&a->coded, row + per_unit, per_unit);
        }
        if (is_hidden) begin_decoding(&decoder, TILE_ROWS(first_vector(a, 1)));
    }
    begin_tiles();
    for (long column = 0; column < a->columns; column += CHAIN) {
        if (is_coded && !is_hidden) decode_chain(&decoder);
        if (!is_coded && IS_WIDENED) widen_chain(a, begin, count, column, made[0]);
        const packed *chain = is_hidden ? made[column / CHAIN & 1] : is_coded || IS_WIDENED ? made[0] : NULL;
        for (long panel = 0; panel < a->panels; panel++)
            multiply_chain(a, begin, count, column, panel, chain, is_hidden ? &decoder : NULL, sums[panel]);
    }
    end_tiles();
    for (long panel = 0; panel < a->panels; panel++) {
        const long first = first_vector(a, panel), vectors = first_vector(a, panel + 1) - first;
        for (long i = 0; i < vectors; i++) {
            for (long n = 0; n < UNIT; n += LANES) transpose(sums[panel] + (n * vectors + i) * LANES, vectors * LANES, turned + n, UNIT);
            const long top = (first + i) * LANES;
            for (long m = 0; m < LANES && top + m < a->rows; m++)
                finish(turned + m * UNIT, per_unit, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                       a->y + ((top + m) * a->outputs + begin) * size);
        }
    }
}

// gemm_is_fast: 1 if this file is used for all rows without a measurement. It is 0 for bf16 on CPUs with matrix units: oneDNN also uses them, and
// crossover.py measures for which rows it is faster.
//
// few_rows: the most rows of x for which each row of a weight is summed separately (linear.c). For more rows, a vector here holds one number of each row
// of x, and a whole vector costs as much as one row. Times in bf16 with 9,728 x 896, in us, for linear.c and this file. Zen 4, whose multiply-adds take
// two cycles, two threads: 393 and 695 at 8 rows, 571 and 689 at 12; one thread: 1,427 and 1,567 at 12, 1,698 and 1,574 at 14. Zen 5 with 4,864 x 896, one
// thread: 419 and 361 at 6, 706 and 360 at 8. Speed in fp32 on a busy Zen 5, in GFLOP/s: 106 and 114 at 20 rows, 104 and 169 at 24. On Emerald Rapids
// torch was faster than linear.c from 8 rows on, and slower at 4.
#if !defined(SCALAR_BF16)
const int NAME(gemm_is_fast) = 1, NAME(few_rows) = 23;
#elif defined(MATRIX_TILES)
const int NAME(gemm_is_fast) = 0, NAME(few_rows) = 4;
#elif defined(WIDE) && defined(__AVX512BF16__)
const int NAME(gemm_is_fast) = 1, NAME(few_rows) = LEVEL1_KIB < 48 ? 12 : 6;
// The weight is widened once for all rows. One thread, GFLOP/s of linear.c, this file and torch: AVX-512 90, 97 and 28 at 16 rows, 89, 135 and 36 at 512.
// AVX2, two threads of Zen 3, 8,192 x 4,096, in ms for linear.c and this file: 5.0 and 6.3 at 8 rows, 7.4 and 8.1 at 12, 8.5 and 8.1 at 14.
#else
const int NAME(gemm_is_fast) = 1, NAME(few_rows) = LANES == 8 ? 12 : 15;
#endif

// Returns 1 if there is no memory.
static int multiply_by(const scalar *x, const scalar *w, coded coded, const scalar *bias, void *y, long rows, long outputs,
                       long columns, long x_stride, int activation, int wide_output, int threads) {
    const long most = rows < PANELS * PANEL ? rows : PANELS * PANEL, padded = whole_squares(columns), per_unit = UNIT / (activation ? 2 : 1);
    packed *packed_x = shared_scratch((most + LANES - 1) / LANES * LANES * padded * sizeof(packed));
    if (!packed_x) return 1;
    for (long top = 0; top < rows; top += PANELS * PANEL) {
        const long count = rows - top < PANELS * PANEL ? rows - top : PANELS * PANEL, vectors = (count + LANES - 1) / LANES;
        char *into = (char *)y + top * outputs * (wide_output ? sizeof(float) : sizeof(scalar));
        const arguments a = {x + top * x_stride, w,       bias,    coded,    packed_x, into,       count,      vectors,
                             (vectors + VECTORS - 1) / VECTORS, outputs, columns, padded, x_stride, activation, wide_output};
        share(pack_vector, &a, vectors, threads);
        share(multiply_unit, &a, (outputs + per_unit - 1) / per_unit, threads);
    }
    return 0;
}

// As `linear`, for more rows.
int NAME(gemm)(const scalar *x, const scalar *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation,
               int wide_output, int threads) {
    return multiply_by(x, w, (coded){0}, bias, y, rows, outputs, columns, x_stride, activation, wide_output, threads);
}

// As `lossless_linear`, for more rows.
int NAME(lossless_gemm)(const scalar *x, const uint8_t *codes, const uint8_t *palettes, const int32_t *starts, const uint32_t *escapes,
                        const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation, int wide_output,
                        int threads) {
    const coded w = {codes, palettes, starts, escapes, coded_row_bytes(columns)};
    return multiply_by(x, NULL, w, bias, y, rows, outputs, columns, x_stride, activation, wide_output, threads);
}
