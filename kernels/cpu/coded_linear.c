// Matrix products with a weight that is kept in codes of four or eight bits: y[m][n] = x[m] . w[n] + bias[n]. Decode steps read a half or a quarter of what
// they would read of bf16, and as many codes of a row as are decoded at a time are multiplied with several rows of x.
#include "codes.h"
#include "coded_gemm.h"
#include "outputs.h"
#include "program.h"

#define W_UNIT 16                          // rows of w that become outputs together
#define W_ROWS(x_rows) ((x_rows) > 4 ? 2 : 4)  // of w that are summed at a time: sums stay in registers
#define X_ROWS 8
#define FEW_ROWS 8                         // rows of x; more are multiplied along their rows (coded_gemm.c)
#define PIECE_BYTES (32 << 10)             // of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (128 << 10)      // and where threads have many to take
#define PIECES_OF_THREAD 8

// As many rows of w as one call of `tile` takes. Those behind the last one are the last one again.
typedef struct {
    const uint8_t *codes[4];
    float scales[4][MOST_STEPS];
    uint8_t zeros[4][MOST_STEPS];
} rows_of_w;

// sums[m][n] = x[m] . w[n] over all steps.
INLINE void tile(const int form, const int step, const int x_rows, const scalar *x, long x_stride, const rows_of_w *w, long steps, float *sums) {
    const int w_rows = W_ROWS(x_rows);
    lanes total[16];
#pragma GCC unroll 16
    for (int i = 0; i < x_rows * w_rows; i++) total[i] = all(0);
    table values = table_of(form, 8);
    for (long s = 0; s < steps; s++) {
        const scalar *columns = x + s * step * BLOCK;
#pragma GCC unroll 4
        for (int n = 0; n < w_rows; n++) {
            const uint8_t *codes = w->codes[n] + s * step * BLOCK_BYTES(form);
            if (form == INT4_ZEROS) values = table_of(form, w->zeros[n][s]);
            lanes part[X_ROWS];
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) part[m] = all(0);
#pragma GCC unroll 4
            for (int b = 0; b < step; b++) {
                piece block[PIECES];
                decode(form, codes + b * BLOCK_BYTES(form), values, block);
#pragma GCC unroll 8
                for (int m = 0; m < x_rows; m++)
#pragma GCC unroll 8
                    for (int i = 0; i < PIECES; i++)
                        part[m] = multiply_add(part[m], block[i], load_piece(columns + m * x_stride + b * BLOCK + i * PIECE));
            }
            const lanes scale = all(w->scales[n][s]);
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) total[m * w_rows + n] += part[m] * scale;
        }
    }
    float reduced[16];
    if (x_rows * w_rows == 16)
        sums_of_16(total, reduced);
    else
        for (int i = 0; i < x_rows * w_rows; i++) reduced[i] = sum_of(total[i]);
    for (int m = 0; m < x_rows; m++)
        for (int n = 0; n < w_rows; n++) sums[m * W_UNIT + n] = reduced[m * w_rows + n];
}

typedef void (*tile_of)(const scalar *x, long x_stride, const rows_of_w *w, long steps, float *sums);

#define TILE(form, step, x_rows) \
    static void tile_##form##_##step##_##x_rows(const scalar *x, long x_stride, const rows_of_w *w, long steps, float *sums) { \
        tile(form, step, x_rows, x, x_stride, w, steps, sums); \
    }
#define TILES(form, step) TILE(form, step, 1) TILE(form, step, 2) TILE(form, step, 4) TILE(form, step, 8)
TILES(INT4, 1) TILES(INT4, 4) TILES(INT4_ZEROS, 1) TILES(INT4_ZEROS, 4) TILES(MXFP4, 1) TILES(INT8, 1) TILES(INT8, 4)
#define ROW(form, step) {tile_##form##_##step##_1, tile_##form##_##step##_2, tile_##form##_##step##_4, tile_##form##_##step##_8}
static const tile_of tile_functions[FORMS][2][4] = {  // by form, step and rows of x
    [INT4] = {ROW(INT4, 1), ROW(INT4, 4)},
    [INT4_ZEROS] = {ROW(INT4_ZEROS, 1), ROW(INT4_ZEROS, 4)},
    [MXFP4] = {ROW(MXFP4, 1), ROW(MXFP4, 1)},
    [INT8] = {ROW(INT8, 1), ROW(INT8, 4)},
};

typedef struct {
    coded w;
    const scalar *x, *bias;  // x: in whole blocks, and as many rows as tiles take
    char *y;
    long rows, x_stride, outputs, units_per_piece;
    int wide_output;
} arguments;

static void multiply_units(const void *given, long piece) {
    const arguments *a = given;
    const coded *w = &a->w;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    const long row_bytes = w->blocks * BLOCK_BYTES(w->form), steps = w->blocks / w->step;
    float sums[FEW_ROWS * W_UNIT + LANES];  // of the last row some lanes behind its end are read, and not used
    rows_of_w rows;
    const long end = W_UNIT * a->units_per_piece * (piece + 1);
    for (long begin = W_UNIT * a->units_per_piece * piece; begin < end && begin < a->outputs; begin += W_UNIT) {
        const long count = a->outputs - begin < W_UNIT ? a->outputs - begin : W_UNIT;
        const int w_rows = W_ROWS(a->rows);
        for (long n = 0; n < count; n += w_rows) {
            for (long i = 0; i < w_rows; i++) {
                const long row = begin + (n + i < count ? n + i : count - 1);
                rows.codes[i] = w->codes + row * row_bytes;
                scales_of(w, row, 0, steps, rows.scales[i], rows.zeros[i]);
            }
            for (long m = 0; m < a->rows;) {
                const long left = a->rows - m;
                // the last tile may have fewer rows, but no more rows of w than the others
                const int which = w_rows == 2 ? 3 : left > 2 ? 2 : left - 1;
                tile_functions[w->form][w->step == 4][which](a->x + m * a->x_stride, a->x_stride, &rows, steps, sums + m * W_UNIT + n);
                m += 1l << which;
            }
        }
        for (long m = 0; m < a->rows; m++)
            finish(sums + m * W_UNIT, 0, a->bias ? a->bias + begin : NULL, a->outputs, count, 0, a->wide_output,
                   a->y + (m * a->outputs + begin) * size);
    }
}

typedef struct {
    const scalar *x;
    scalar *padded;
    long rows, columns, stride, x_stride;
} padding;

static void pad_row(const void *given, long m) {
    const padding *p = given;
    scalar *to = p->padded + m * p->stride;
    const long columns = m < p->rows ? p->columns : 0;
    memcpy(to, p->x + m * p->x_stride, columns * sizeof *to);
    memset(to + columns, 0, (p->stride - columns) * sizeof *to);
}

// Whether codes are decoded by vectors here, so that they are faster than bf16.
#if defined(WIDE) || (LANES == 8 && defined(__AVX2__))
const int NAME(coded_is_fast) = 1;
#else
const int NAME(coded_is_fast) = 0;
#endif

// y [rows][outputs] = x w^T + bias. codes [outputs][blocks], scales and zeros (or NULL) [outputs][groups], a group `group` columns, whole blocks unless it is
// a row's only one. wide_output: y is fp32 whatever the scalar, rounded as if it were not. 1: there is no memory.
int NAME(coded_linear)(const scalar *x, const uint8_t *codes, const void *scales, const uint8_t *zeros, const scalar *bias, void *y, long rows,
                       long outputs, long columns, long x_stride, long group, int form, int scale_type, int wide_output, int threads) {
    const long blocks = (columns + BLOCK - 1) / BLOCK, groups = (columns + group - 1) / group;
    const long blocks_per_group = groups == 1 ? blocks : group / BLOCK;
    const coded whole = {codes, zeros, scales, blocks, groups, blocks_per_group, 1, blocks_per_group, form == INT4 && zeros ? INT4_ZEROS : form, scale_type};
    const coded w = in_steps(whole, form == MXFP4 ? 1 : 4);
    if (rows > FEW_ROWS) return NAME(coded_gemm)(x, &w, bias, y, rows, outputs, columns, x_stride, wide_output, threads);
    const scalar *in_blocks = x;
    if (rows > 1 || columns % BLOCK) {
        const long tiled = rows > 4 ? (rows + X_ROWS - 1) / X_ROWS * X_ROWS : rows == 3 ? 4 : rows;
        const long stride = (blocks + 1) * BLOCK;  // rows that lie a multiple of 4 KiB apart would compete for the cache
        scalar *padded = shared_scratch(tiled * stride * sizeof *padded);
        if (!padded) return 1;
        const padding p = {x, padded, rows, columns, stride, x_stride};
        share(pad_row, &p, tiled, 1);
        in_blocks = padded, x_stride = stride;
    }
    const long unit_bytes = W_UNIT * blocks * BLOCK_BYTES(form), units = (outputs + W_UNIT - 1) / W_UNIT;
    const long even = units * unit_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long per_piece = 1 + piece_bytes / (unit_bytes + 1);
    const arguments a = {w, in_blocks, bias, y, rows, x_stride, outputs, per_piece, wide_output};
    const reading reads = {.begin = (const char *)codes, .bytes_of_piece = per_piece * unit_bytes};
    share_reading(multiply_units, &a, sizeof a, reads, (units + per_piece - 1) / per_piece, threads);
    return 0;
}
