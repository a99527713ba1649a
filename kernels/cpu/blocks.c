// Matrix products of a few rows with weights in a GGUF file's blocks (blocks.h), and rows of such weights: y[m][n] = x[m] . w[n] + bias[n].
//
// Of each 32 columns x becomes bytes times a scale, as ggml's own products have it: a value is off by no more than a 254th of the largest of its 32. Codes
// and bytes are multiplied as integers; what is added to a code's product is multiplied with the sum of those bytes. More rows go through gemm.c, for
// which codes are decoded a tile at a time.
#include "block_gemm.h"
#include "outputs.h"
#include "program.h"

#define W_UNIT 16              // rows of w that become outputs together
#define FEW_ROWS 8             // of x, at most
#define CHUNK 2048             // columns whose scales are worked out at a time
#define GROUPS (CHUNK / SCALE_COLUMNS)
#define AHEAD 2048             // bytes that are fetched before
#define PIECE_BYTES (32 << 10)  // of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (128 << 10)  // and where threads have many to take
#define PIECES_OF_THREAD 8

// Rows of x: of each 16 columns the scale, and the sum of what the bytes stand for; zeros behind the last column up to whole vectors.
typedef struct {
    int8_t *values;
    float *scales, *sums;
    long values_stride, groups_stride;
} byte_rows;

typedef void (*row_product)(const byte_rows *x, const uint8_t *row, long columns, lanes *totals);
extern const row_product block_products[BLOCK_KINDS][4];  // by kind and rows of x: 1, 2, 4, 8

#ifndef SCALAR_BF16  // compiled once
// codes . x, of neighbouring four.
INLINE lanes_i32 dot_of_step(const int has_large, code_bytes codes, const int8_t *x) {
#if defined(WIDE) && defined(__AVX512VNNI__)
    return (lanes_i32)_mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)codes, _mm512_loadu_si512(x));
#elif defined(WIDE)
    const __m512i a = (__m512i)codes, b = _mm512_loadu_si512(x);
    if (!has_large) return (lanes_i32)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    return (lanes_i32)_mm512_add_epi32(even, _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8)));
#elif LANES == 8 && defined(__AVX2__)
    const __m256i a = (__m256i)codes, b = _mm256_loadu_si256((const __m256i *)x);
#ifdef __AVXVNNI__
    return (lanes_i32)_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), a, b);
#else
    if (!has_large) return (lanes_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    return (lanes_i32)_mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8)));
#endif
#else  // of fewer lanes than a step has fours, the sums of more of them
    lanes_i32 found = {0};
    for (int i = 0; i < STEP_COLUMNS; i++) found[i * LANES / STEP_COLUMNS] += codes[i] * x[i];
    return found;
#endif
}

// A number for each 16 columns of a step, in all of their lanes.
INLINE lanes in_lanes_of_groups(const float *of_groups) {
#ifdef WIDE
    const __m512i places = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return (lanes)_mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_loadu_ps(of_groups)));
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = of_groups[i * 2 / LANES];
    return v;
#endif
}

// totals[m * W_UNIT] = x[m] . row, in lanes that are still to be added up.
INLINE void row_by_rows(const int kind, const int x_rows, const byte_rows *x, const uint8_t *row, long columns, lanes *totals) {
    lanes total[FEW_ROWS];
    float scales[GROUPS + 16] __attribute__((aligned(64))), added[GROUPS + 16] __attribute__((aligned(64)));
    float products[FEW_ROWS][GROUPS] __attribute__((aligned(64)));  // of both scales
#pragma GCC unroll 8
    for (int m = 0; m < x_rows; m++) total[m] = all(0);
    for (long first = 0; first < columns; first += CHUNK) {
        const long count = columns - first < CHUNK ? columns - first : CHUNK, steps = count / STEP_COLUMNS, begin = first / STEP_COLUMNS;
        scales_of_blocks(kind, row, first, count, scales, added);
        for (long group = 0; group < count / SCALE_COLUMNS; group += LANES) {
            const lanes scale = load_f32(scales + group), more = load_f32(added + group);
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) {
                const long at = m * x->groups_stride + first / SCALE_COLUMNS + group;
                store_f32(products[m] + group, scale * load_f32(x->scales + at));
                total[m] += more * load_f32(x->sums + at);
            }
        }
        const int8_t *values = x->values + first;
        const uint8_t *ahead = row + first / block_sizes[kind].columns * block_sizes[kind].bytes + AHEAD;
#define STEP(i, is_half) \
    do { \
        const code_bytes codes = codes_of(kind, row, begin + (i), is_half); \
        __builtin_prefetch(ahead + (i) * (STEP_COLUMNS * block_sizes[kind].bytes / block_sizes[kind].columns), 0, 3); \
        _Pragma("GCC unroll 8") for (int m = 0; m < x_rows; m++) { \
            const lanes_i32 dot = dot_of_step(HAS_LARGE_CODES(kind), codes, values + m * x->values_stride + (i) * STEP_COLUMNS); \
            total[m] += __builtin_convertvector(dot, lanes) * in_lanes_of_groups(products[m] + STEP_COLUMNS / SCALE_COLUMNS * (i)); \
        } \
    } while (0)
        long i = 0;
        if (block_sizes[kind].columns == 256)  // in what the parts of a block differ is then known to the compiler
            for (; i < steps; i += 256 / STEP_COLUMNS) {
                STEP(i, 0);
                STEP(i + 1, 0);
                STEP(i + 2, 0);
                STEP(i + 3, 0);
#if STEP_COLUMNS == 32
                STEP(i + 4, 0);
                STEP(i + 5, 0);
                STEP(i + 6, 0);
                STEP(i + 7, 0);
#endif
            }
        else
#pragma GCC unroll 2
            for (; i < steps; i++) STEP(i, 0);
        if (count % STEP_COLUMNS) STEP(i, 1);
#undef STEP
    }
#pragma GCC unroll 8
    for (int m = 0; m < x_rows; m++) totals[m * W_UNIT] = total[m];
}

#define PRODUCT(kind, x_rows) \
    static void product_##kind##_##x_rows(const byte_rows *x, const uint8_t *row, long columns, lanes *totals) { \
        row_by_rows(kind, x_rows, x, row, columns, totals); \
    }
#define PRODUCTS(kind) PRODUCT(kind, 1) PRODUCT(kind, 2) PRODUCT(kind, 4) PRODUCT(kind, 8)
PRODUCTS(Q4_0) PRODUCTS(Q4_1) PRODUCTS(Q5_0) PRODUCTS(Q5_1) PRODUCTS(Q8_0) PRODUCTS(IQ4_NL) PRODUCTS(Q3_K) PRODUCTS(Q4_K) PRODUCTS(Q5_K) PRODUCTS(Q6_K)
#define ROW(kind) [kind] = {product_##kind##_1, product_##kind##_2, product_##kind##_4, product_##kind##_8}
const row_product block_products[BLOCK_KINDS][4] = {ROW(Q4_0),   ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0),
                                                    ROW(IQ4_NL), ROW(Q3_K), ROW(Q4_K), ROW(Q5_K), ROW(Q6_K)};
#endif

INLINE uint32_t most_of(lanes_u32 v) {
    uint32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// Thirty-two columns of x, `columns` of which are there: bytes, and of either half the scale and the sum. The scale is NaN where a value is not finite.
INLINE void round_block(const scalar *x, long columns, int8_t *to, float *scales, float *sums) {
    lanes value[32 / LANES];
    lanes_u32 most = {0};
    for (int i = 0; i < 32 / LANES; i++) {
        const long left = columns - i * LANES;
        value[i] = left >= LANES ? load(x + i * LANES) : left > 0 ? load_part(x + i * LANES, left) : all(0);
        const lanes_u32 bits = (lanes_u32)value[i] & 0x7fffffff, is_more = (lanes_u32)(bits > most);
        most = (bits & is_more) | (most & ~is_more);
    }
    const uint32_t bits = most_of(most);
    float largest;
    memcpy(&largest, &bits, 4);
    const int is_finite = bits < 0x7f800000u, is_tiny = largest < 0x1p-100f;  // whose inverse would be infinite
    const float scale = !is_finite ? NAN : is_tiny ? 0 : largest / 127.0f, up = is_finite && !is_tiny ? 127.0f / largest : 0;
    int32_t whole[32];
    for (int i = 0; i < 32 / LANES; i++) {
        const lanes_i32 integers = __builtin_convertvector((is_finite ? value[i] * up : all(0)) + 12582912.0f - 12582912.0f, lanes_i32);
        memcpy(whole + i * LANES, &integers, sizeof integers);
    }
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < 32; i++) to[i] = (int8_t)whole[i];
    for (int i = 0; i < 16; i++) sum[0] += whole[i], sum[1] += whole[16 + i];
    for (int i = 0; i < 2; i++) scales[i] = scale, sums[i] = scale * sum[i];
}

typedef struct {
    byte_rows into;
    const scalar *x;
    long rows, columns, x_stride;
} rounding;

// Row m; behind the last row of x zeros.
static void round_row(const void *given, long m) {
    const rounding *r = given;
    const scalar *x = r->x + m * r->x_stride;
    int8_t *values = r->into.values + m * r->into.values_stride;
    float *scales = r->into.scales + m * r->into.groups_stride, *sums = r->into.sums + m * r->into.groups_stride;
    const long columns = m < r->rows ? r->columns : 0;
    long column = 0;
    for (; column < columns; column += 32) round_block(x + column, columns - column, values + column, scales + column / 16, sums + column / 16);
    memset(values + column, 0, r->into.values_stride - column);
    memset(scales + column / 16, 0, (r->into.groups_stride - column / 16) * sizeof *scales);
    memset(sums + column / 16, 0, (r->into.groups_stride - column / 16) * sizeof *sums);
}

typedef struct {
    block_rows w;
    byte_rows x;  // as many rows as a product takes
    const scalar *bias;
    char *y;
    long rows, outputs, columns, units_per_piece;
    int which, activation, wide_output;  // which: of the products
} arguments;

static void multiply_units(const void *given, long piece) {
    const arguments *a = given;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    lanes totals[FEW_ROWS * W_UNIT];
    float sums[FEW_ROWS][2 * W_UNIT + LANES];  // some lanes behind the last sum are read, and not used
    memset(totals, 0, sizeof *totals * W_UNIT << a->which);
    const long end = W_UNIT * a->units_per_piece * (piece + 1);
    for (long begin = W_UNIT * a->units_per_piece * piece; begin < end && begin < a->outputs; begin += W_UNIT) {
        const long count = a->outputs - begin < W_UNIT ? a->outputs - begin : W_UNIT;
        for (int part = 0; part < 1 + (a->activation != 0); part++) {
            for (long n = 0; n < count; n++) {
                int kind;
                const uint8_t *row = block_row(&a->w, part * a->outputs + begin + n, &kind);
                block_products[kind][a->which](&a->x, row, a->columns, totals + n);
            }
            for (long m = 0; m < a->rows; m++) sums_of_16(totals + m * W_UNIT, sums[m] + part * W_UNIT);
        }
        for (long m = 0; m < a->rows; m++)
            finish(sums[m], W_UNIT, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                   a->y + (m * a->outputs + begin) * size);
    }
}

// block_few_rows: of x, up to which codes are multiplied as they lie; for more it is faster to decode them once (Emerald Rapids).
#if defined(SCALAR_BF16) && (defined(SOFTWARE_TILES) || defined(__AMX_BF16__))
const int NAME(block_few_rows) = 4;
#else
const int NAME(block_few_rows) = FEW_ROWS;
#endif

// y [rows][outputs] = x w^T + bias, w up to three matrices one below the other, of so many rows each; kinds has a byte for each. With an activation w has
// twice the outputs, gates above ups. wide_output: y is fp32 whatever the scalar, rounded as if it were not. 1: there is no memory.
int NAME(block_linear)(const scalar *x, const uint8_t *first, const uint8_t *second, const uint8_t *third, const scalar *bias, void *y, long rows,
                       long columns, long x_stride, long rows_of_first, long rows_of_second, long rows_of_third, long kinds, int activation,
                       int wide_output, int threads) {
    const block_rows w = rows_of_blocks(first, second, third, rows_of_first, rows_of_second, rows_of_third, kinds, columns);
    const long outputs = w.ends[2] / (activation ? 2 : 1);
    if (rows > NAME(block_few_rows)) return NAME(block_gemm)(x, &w, bias, y, rows, outputs, columns, x_stride, activation, wide_output, threads);
    const int which = rows > 4 ? 3 : rows > 2 ? 2 : (int)rows - 1;
    // rows that lie a multiple of 4 KiB apart would compete for the cache
    const long values_stride = (columns + 255) / 256 * 256 + 64, groups_stride = values_stride / 64 * 4 + 16;
    int8_t *values = shared_scratch((values_stride + 2 * groups_stride * sizeof(float)) << which);
    if (!values) return 1;
    float *scales = (float *)(values + (values_stride << which));
    const byte_rows rounded = {values, scales, scales + (groups_stride << which), values_stride, groups_stride};
    const rounding r = {rounded, x, rows, columns, x_stride};
    share(round_row, &r, 1l << which, 1);
    const long row_bytes = w.row_bytes[0], unit_bytes = W_UNIT * row_bytes * (activation ? 2 : 1), units = (outputs + W_UNIT - 1) / W_UNIT;
    const long even = units * unit_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long per_piece = 1 + piece_bytes / (unit_bytes + 1);
    const arguments a = {w, rounded, bias, y, rows, outputs, columns, per_piece, which, activation, wide_output};
    const uint8_t *ups = !activation ? NULL : second ? second : first + outputs * row_bytes;
    const reading reads = {.begin = (const char *)first, .second = (const char *)ups, .bytes_of_piece = per_piece * W_UNIT * row_bytes};
    share_reading(multiply_units, &a, sizeof a, reads, (units + per_piece - 1) / per_piece, threads);
    return 0;
}

// Columns first .. first + count of a row, `first` a multiple of 256, as the products' pieces have them; up to 63 columns behind the last are written, too.
INLINE void decode_kind(const int kind, const uint8_t *row, long first, long count, packed *to) {
    float scales[GROUPS + 16] __attribute__((aligned(64))), added[GROUPS + 16] __attribute__((aligned(64)));
    scales_of_blocks(kind, row, first, count, scales, added);
    for (long i = 0; i * STEP_COLUMNS < count; i++) {
        const code_bytes codes = codes_of(kind, row, first / STEP_COLUMNS + i, count - i * STEP_COLUMNS < STEP_COLUMNS);
        __builtin_prefetch(row + (first + count) / block_sizes[kind].columns * block_sizes[kind].bytes + i * STEP_COLUMNS, 0, 3);
        lanes values[STEP_COLUMNS / LANES];
#pragma GCC unroll 8
        for (int j = 0; j < STEP_COLUMNS / LANES; j++) {
            const long group = (i * STEP_COLUMNS + j * LANES) / SCALE_COLUMNS;
#ifdef WIDE
            const lanes whole = (lanes)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32((__m512i)codes, j)));
#elif LANES == 8 && defined(__AVX2__)
            const __m128i quarter = _mm256_extracti128_si256((__m256i)codes, j >= 2);
            const lanes whole = (lanes)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(j & 1 ? _mm_unpackhi_epi64(quarter, quarter) : quarter));
#else
            lanes whole;
            for (int k = 0; k < LANES; k++) whole[k] = codes[LANES * j + k];
#endif
            values[j] = whole * scales[group] + added[group];
        }
#if PER_LANE == 2
        for (int j = 0; j < 4; j += 2) _mm512_storeu_si512(to + i * STEP_COLUMNS + 16 * j, (__m512i)_mm512_cvtne2ps_pbh((__m512)values[j + 1], (__m512)values[j]));
#else
        memcpy(to + i * STEP_COLUMNS, values, sizeof values);
#endif
    }
}

// As decode_kind, of any kind; count <= CHUNK.
void NAME(decode_blocks)(int kind, const uint8_t *row, long first, long count, packed *to) {
    switch (kind) {
#define CASE(kind) \
    case kind: decode_kind(kind, row, first, count, to); break;
        CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(IQ4_NL) CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
#undef CASE
    }
}

typedef struct {
    block_rows w;
    const int64_t *numbers;
    scalar *y;
    long columns;
    float scale;
} picking;

static void pick_row(const void *given, long i) {
    const picking *p = given;
    int kind;
    const int64_t number = p->numbers[i];
    const int is_there = number >= 0 && number < p->w.ends[2];
    const uint8_t *row = block_row(&p->w, is_there ? number : 0, &kind);
    const float factor = is_there ? p->scale : NAN;  // as rows.c has it
    packed decoded[CHUNK + 64];
    for (long first = 0; first < p->columns; first += CHUNK) {
        const long count = p->columns - first < CHUNK ? p->columns - first : CHUNK;
        NAME(decode_blocks)(kind, row, first, count, decoded);
        scalar *to = p->y + i * p->columns + first;
#if PER_LANE == 2
        for (long k = 0; k < count; k++) to[k] = factor == 1.0f ? decoded[k] : put(widen(decoded[k]) * factor);
#else
        for (long k = 0; k < count; k++) to[k] = factor == 1.0f ? put(decoded[k]) : put(get(put(decoded[k])) * factor);
#endif
    }
}

// y [count][columns] = rows `numbers` of w, times `scale`, which is a number of the scalar's type; NaN for a number that is no row's.
void NAME(block_rows)(const uint8_t *first, const uint8_t *second, const uint8_t *third, const int64_t *numbers, void *y, long count, long columns,
                      long rows_of_first, long rows_of_second, long rows_of_third, long kinds, float scale, int threads) {
    const block_rows w = rows_of_blocks(first, second, third, rows_of_first, rows_of_second, rows_of_third, kinds, columns);
    const picking p = {w, numbers, y, columns, scale};
    share(pick_row, &p, count, threads);
}
