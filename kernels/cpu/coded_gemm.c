// Matrix products of dozens to thousands of rows with a weight in codes (codes.h). As in gemm.c, a vector holds one number of each of several rows of x,
// and threads take rows of w. They decode a chunk of columns at a time, and multiply it with all panels of x while it is in the second-level cache. The
// sum of each step is multiplied by its scale.
#include "coded_gemm.h"
#include "outputs.h"
#include "packing.h"
#include "program.h"

#define VECTORS (LANES == 8 ? 2 : 4)  // as in gemm.c
// Sums of a step that stay in registers. With one or two vectors the totals over all steps also stay there.
#define SUMS(vectors) (LANES == 16 ? ((vectors) > 2 ? 24 : 12) : (vectors) > 1 ? 12 : 6)
#define PANEL (VECTORS * LANES)
#define UNIT 48
#define CHUNK 256  // columns that are decoded at a time
#define CHUNK_STEPS (CHUNK / BLOCK)
#define PANELS 8  // panels of x that each unit is multiplied with

typedef struct {
    packed values[UNIT][CHUNK];
    float scales[UNIT][CHUNK_STEPS];
} chunk;

// sums [w_rows][vectors * LANES] = or += the scaled products of the steps of a chunk; x [columns / PER_LANE][vectors][LANES][PER_LANE].
INLINE void tile(const int vectors, const int w_rows, const packed *x, const chunk *w, long row, long columns, long step_columns, int goes_on,
                 float *sums) {
    lanes total[SUMS(vectors)];
#pragma GCC unroll 24
    for (int i = 0; i < w_rows * vectors; i++) total[i] = goes_on ? load_f32(sums + i * LANES) : all(0);
    for (long k = 0, s = 0; k < columns; s++) {
        lanes sum[SUMS(vectors)];
#pragma GCC unroll 24
        for (int i = 0; i < w_rows * vectors; i++) sum[i] = all(0);
        for (const long stop = columns - k < step_columns ? columns : k + step_columns; k < stop; k += PER_LANE) {
            piece rows[VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) rows[i] = load_packed(x + (k * vectors + i * PER_LANE) * LANES);
#pragma GCC unroll 24
            for (int n = 0; n < w_rows; n++) {
                const piece columns_of_w = repeated(w->values[row + n] + k);
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++) sum[n * vectors + i] = multiply_add(sum[n * vectors + i], rows[i], columns_of_w);
            }
        }
#pragma GCC unroll 24
        for (int n = 0; n < w_rows; n++) {
            const lanes scale = all(w->scales[row + n][s]);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) total[n * vectors + i] += sum[n * vectors + i] * scale;
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < w_rows * vectors; i++) store_f32(sums + i * LANES, total[i]);
}

INLINE void tiles_of(const int vectors, const packed *x, const chunk *w, long w_rows, long columns, long step_columns, int goes_on, float *sums) {
    long n = 0;
    for (; n + SUMS(vectors) / vectors <= w_rows; n += SUMS(vectors) / vectors)
        tile(vectors, SUMS(vectors) / vectors, x, w, n, columns, step_columns, goes_on, sums + n * vectors * LANES);
    for (; n < w_rows; n++) tile(vectors, 1, x, w, n, columns, step_columns, goes_on, sums + n * vectors * LANES);
}

static void multiply(long vectors, const packed *x, const chunk *w, long w_rows, long columns, long step_columns, int goes_on, float *sums) {
    switch (vectors) {
#define CASE(count) \
    case count: tiles_of(count, x, w, w_rows, columns, step_columns, goes_on, sums); break;
        CASE(1) CASE(2)
#if LANES != 8
        CASE(3) CASE(4)
#endif
#undef CASE
    }
}

typedef struct {
    coded w;
    const scalar *x, *bias;
    packed *packed_x;  // [panels][padded / PER_LANE][vectors][LANES][PER_LANE]
    char *y;
    long rows, vectors, panels, outputs, columns, padded, x_stride;
    int wide_output;
} arguments;

INLINE long first_vector(const arguments *a, long panel) { return panel * a->vectors / a->panels; }

static void pack_vector(const void *given, long vector) {
    const arguments *a = given;
    long panel = 0;
    while (first_vector(a, panel + 1) <= vector) panel++;
    const long first = first_vector(a, panel), vectors = first_vector(a, panel + 1) - first;
    const scalar *rows[LANES];
    for (long lane = 0; lane < LANES; lane++) {
        const long row = vector * LANES + lane;
        rows[lane] = a->x + (row < a->rows ? row : a->rows - 1) * a->x_stride;  // lanes after the last row repeat it; their sums are not used
    }
    pack(rows, a->columns, a->packed_x + (first * a->padded + (vector - first) * PER_LANE) * LANES, vectors * SQUARE);
}

INLINE void decode_row(const int form, const coded *w, const uint8_t *codes, long first, long count, const uint8_t *zeros, packed *to) {
    for (long b = 0; b < count; b++) {
        piece block[PIECES];
        decode(form, codes + (first + b) * BLOCK_BYTES(form), table_of(form, zeros[b / w->step]), block);
        memcpy(to + b * BLOCK, block, sizeof block);
    }
}

static void decode_chunk(const coded *w, long begin, long rows, long first, long count, chunk *to) {
    uint8_t zeros[CHUNK_STEPS] = {0};
    const long row_bytes = w->blocks * BLOCK_BYTES(w->form);
    for (long n = 0; n < rows; n++) {
        const uint8_t *codes = w->codes + (begin + n) * row_bytes;
        scales_of(w, begin + n, first / w->step, count / w->step, to->scales[n], zeros);
        switch (w->form) {
#define CASE(form) \
    case form: decode_row(form, w, codes, first, count, zeros, to->values[n]); break;
            CASE(INT4) CASE(INT4_ZEROS) CASE(MXFP4) CASE(INT8)
#undef CASE
        }
    }
}

static void multiply_unit(const void *given, long unit) {
    const arguments *a = given;
    const long begin = unit * UNIT, count = a->outputs - begin < UNIT ? a->outputs - begin : UNIT;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    float sums[PANELS][UNIT * PANEL] __attribute__((aligned(64))), turned[LANES * UNIT + LANES] __attribute__((aligned(64)));
    chunk w __attribute__((aligned(64)));
    for (long first = 0; first < a->w.blocks; first += CHUNK_STEPS) {
        const long blocks = a->w.blocks - first < CHUNK_STEPS ? a->w.blocks - first : CHUNK_STEPS;
        const long column = first * BLOCK, columns = (a->padded - column < blocks * BLOCK ? a->padded - column : blocks * BLOCK);
        decode_chunk(&a->w, begin, count, first, blocks, &w);
        for (long panel = 0; panel < a->panels; panel++) {
            const long vector = first_vector(a, panel), vectors = first_vector(a, panel + 1) - vector;
            multiply(vectors, a->packed_x + (vector * a->padded + vectors * column) * LANES, &w, count, columns, a->w.step * BLOCK, first > 0,
                     sums[panel]);
        }
    }
    for (long panel = 0; panel < a->panels; panel++) {
        const long vector = first_vector(a, panel), vectors = first_vector(a, panel + 1) - vector;
        for (long i = 0; i < vectors; i++) {
            for (long n = 0; n < UNIT; n += LANES) transpose(sums[panel] + (n * vectors + i) * LANES, vectors * LANES, turned + n, UNIT);
            const long top = (vector + i) * LANES;
            for (long m = 0; m < LANES && top + m < a->rows; m++)
                finish(turned + m * UNIT, 0, a->bias ? a->bias + begin : NULL, a->outputs, count, 0, a->wide_output,
                       a->y + ((top + m) * a->outputs + begin) * size);
        }
    }
}

int NAME(coded_gemm)(const scalar *x, const coded *weight, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride,
                     int wide_output, int threads) {
    const long most = rows < PANELS * PANEL ? rows : PANELS * PANEL, padded = whole_squares(columns);
    packed *packed_x = shared_scratch((most + LANES - 1) / LANES * LANES * padded * sizeof(packed));
    if (!packed_x) return 1;
    const coded w = in_steps(*weight, 4);
    for (long top = 0; top < rows; top += PANELS * PANEL) {
        const long count = rows - top < PANELS * PANEL ? rows - top : PANELS * PANEL, vectors = (count + LANES - 1) / LANES;
        char *into = (char *)y + top * outputs * (wide_output ? sizeof(float) : sizeof(scalar));
        const arguments a = {w, x + top * x_stride, bias,    packed_x, into,   count,    vectors, (vectors + VECTORS - 1) / VECTORS,
                             outputs, columns,      padded, x_stride, wide_output};
        share(pack_vector, &a, vectors, threads);
        share(multiply_unit, &a, (outputs + UNIT - 1) / UNIT, threads);
    }
    return 0;
}
