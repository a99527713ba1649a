// Matrix products of a few rows with a weight in codes of four or eight bits: y[m][n] = x[m] . w[n] + bias[n]. Decode steps read a half or a quarter of
// the bytes of a bf16 weight. Codes become integers, which are multiplied with several rows of x (fixed_point.h).
#include "coded_gemm.h"
#include "fixed_point.h"
#include "outputs.h"
#include "program.h"

#define W_UNIT 16                          // rows of w that become outputs together
#define W_ROWS(x_rows) ((x_rows) > 4 ? 2 : 1)  // rows of w that are summed together: two are read from memory at 0.7 of the speed of one
#define FEW_ROWS 8                         // most rows of x; coded_gemm.c takes more
#define AHEAD 4096                         // distance of the bytes fetched: int8 on a thread of Zen 5 reads 36 GB/s, and 29 without fetching
#define PIECE_BYTES (32 << 10)             // bytes of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (128 << 10)      // the same if every thread takes many such pieces
#define PIECES_OF_THREAD 8
#define SCALE_BYTES(type) ((type) == SCALES_F32 ? 4 : (type) == SCALES_E8M0 ? 1 : 2)

// The rows of w for one call of `tile`. If there are fewer, the last one is repeated.
typedef struct {
    const uint8_t *codes[2];
    float scales[2][MOST_STEPS + LANES] __attribute__((aligned(64)));  // one per block
    float zeros[2][MOST_STEPS + LANES];   // one per block, in both halves of a float
} rows_of_w;

// Loads `count` <= LANES scales from number `at` on; the other lanes are zero.
INLINE lanes scales_from(const coded *w, long at, long count) {
#ifdef WIDE
    const __mmask16 wanted = (__mmask16)((1u << count) - 1);
    switch (w->scale_type) {
        case SCALES_F32: return (lanes)_mm512_maskz_loadu_ps(wanted, w->scales + 4 * at);
        case SCALES_BF16: return widen_lanes((lanes_u16)_mm256_maskz_loadu_epi16(wanted, w->scales + 2 * at));
        case SCALES_F16: return (lanes)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(wanted, w->scales + 2 * at));
        case SCALES_E8M0: {
            const __m512i power = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(wanted, w->scales + at));
            return (lanes)_mm512_max_epi32(_mm512_slli_epi32(power, 23), _mm512_set1_epi32(1 << 22));  // 2^-127 is subnormal
        }
    }
#endif
    float found[LANES] = {0};
    convert_scales(w, at, count, found);
    return load_f32(found);
}

// Loads `count` <= LANES zeros from number `at` on, each in both halves of its lane.
INLINE lanes zeros_from(const coded *w, long at, long count) {
#ifdef WIDE
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), w->zeros + at));
    return (lanes)_mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16));
#else
    lanes_u32 found = {0};
    for (long i = 0; i < count; i++) found[i] = w->zeros[at + i] * 0x10001u;
    return (lanes)found;
#endif
}

// Returns v[places[i]] in lane i.
INLINE lanes pick(lanes v, lanes_i32 places) {
#ifdef WIDE
    return (lanes)_mm512_permutexvar_ps((__m512i)places, (__m512)v);
#elif LANES == 8 && defined(__AVX2__)
    return (lanes)_mm256_permutevar8x32_ps((__m256)v, (__m256i)places);
#else
    lanes found;
    for (int i = 0; i < LANES; i++) found[i] = v[places[i]];
    return found;
#endif
}

// Loads a row's scales and zeros, one for each of its blocks.
INLINE void take_row(const coded *w, long row, float *scales, float *zeros) {
    const long begin = row * w->groups, per_group = w->blocks_per_group;
    if (per_group < LANES && LANES % per_group == 0) {
        lanes_i32 places;
        for (int i = 0; i < LANES; i++) places[i] = i;
        places >>= __builtin_ctzl(per_group);
        const long step = LANES >> __builtin_ctzl(per_group), ahead = AHEAD / BLOCK_BYTES(w->form) >> __builtin_ctzl(per_group);
        for (long group = 0; group < w->groups; group += step, scales += LANES, zeros += LANES) {
            const long count = w->groups - group < step ? w->groups - group : step;
            // scales are too few cache lines for the hardware prefetcher: without this, int8 in groups of 32 reads 25 GB/s
            __builtin_prefetch(w->scales + (begin + group + ahead) * SCALE_BYTES(w->scale_type), 0, 3);
            store_f32(scales, pick(scales_from(w, begin + group, count), places));
            if (w->zeros) store_f32(zeros, pick(zeros_from(w, begin + group, count), places));
        }
        return;
    }
    for (long group = 0; group < w->groups; group++, scales += per_group, zeros += per_group) {
        const lanes scale = all(scale_at(w, begin + group)), zero = w->zeros ? all(from_bits(w->zeros[begin + group] * 0x10001u)) : scale;
        for (long i = 0; i < per_group; i += LANES) store_f32(scales + i, scale);
        for (long i = 0; w->zeros && i < per_group; i += LANES) store_f32(zeros + i, zero);
    }
}

// Adds a step: total[m][n] += x[m] . w[n].
INLINE void add_step(const int form, const int x_rows, const int w_rows, const int16_t *x, long x_stride, const float (*scales)[2][LANES],
                     const uint8_t *const *codes, long end, const float *const *zeros, long block, lanes *total) {
    halves w[2][4];
#pragma GCC unroll 2
    for (int n = 0; n < w_rows; n++) {
        for (long line = 0; line < STEP_BLOCKS * BLOCK_BYTES(form); line += 64) __builtin_prefetch(codes[n] + AHEAD + line, 0, 3);
        to_integers(form, codes[n], end, form == INT4_ZEROS ? (halves)in_lanes_of_blocks(zeros[n] + block) : (halves){0}, w[n]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < x_rows; m++)
#pragma GCC unroll 2
        for (int n = 0; n < w_rows; n++) {
            lanes product = all(0);
#pragma GCC unroll 2
            for (int limb = 0; limb < LIMBS; limb++) {
                lanes_i32 sum = {0};
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) sum = add_products(sum, w[n][i], load_halves(x + m * x_stride + (limb * 4 + i) * HALVES));
                product = limb ? product * 32768.0f + __builtin_convertvector(sum, lanes) : __builtin_convertvector(sum, lanes);
            }
            total[m * w_rows + n] += product * in_lanes_of_blocks(scales[m][n] + block);
        }
}

// totals[m][n] = x[m] . w[n], as vectors whose lanes remain to be added up.
INLINE void tile(const int form, const int x_rows, const fixed_rows *x, const rows_of_w *w, long blocks_of_row, lanes *totals) {
    const int w_rows = W_ROWS(x_rows);
    lanes total[2 * FEW_ROWS];
    float scales[FEW_ROWS][2][LANES] __attribute__((aligned(64)));  // aligned, because a load soon after a store is slow if it crosses cache lines
    const uint8_t *codes[2] = {w->codes[0], w->codes[1]};
    const float *zeros[2] = {w->zeros[0], w->zeros[1]};
    const int16_t *values = x->values;
#pragma GCC unroll 16
    for (int i = 0; i < x_rows * w_rows; i++) total[i] = all(0);
    for (long first = 0; first < blocks_of_row; first += LANES) {
#pragma GCC unroll 2
        for (int n = 0; n < w_rows; n++) {
            const lanes of_w = load_f32(w->scales[n] + first) * (form == MXFP4 ? 0.5f : 1.0f);
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) store_f32(scales[m][n], of_w * load_f32(x->scales + m * x->scales_stride + first));
        }
        const long left = blocks_of_row - first, blocks = left < LANES ? left : LANES;
        long block = 0;
#pragma GCC unroll 4  // int4 in groups of 32: 31 GB/s, and 26 without
        for (; block + STEP_BLOCKS <= blocks; block += STEP_BLOCKS, values += STEP_VALUES) {
            add_step(form, x_rows, w_rows, values, x->values_stride, scales, codes, STEP_BLOCKS * BLOCK_BYTES(form), zeros, block, total);
            for (int n = 0; n < w_rows; n++) codes[n] += STEP_BLOCKS * BLOCK_BYTES(form);
        }
        if (block < blocks)
            add_step(form, x_rows, w_rows, values, x->values_stride, scales, codes, (blocks - block) * BLOCK_BYTES(form), zeros, block, total);
        zeros[0] += LANES, zeros[1] += LANES;
    }
    for (int m = 0; m < x_rows; m++)
        for (int n = 0; n < w_rows; n++) totals[m * W_UNIT + n] = total[m * w_rows + n];
}

typedef void (*tile_of)(const fixed_rows *x, const rows_of_w *w, long blocks, lanes *totals);

#define TILE(form, x_rows) \
    static void tile_##form##_##x_rows(const fixed_rows *x, const rows_of_w *w, long blocks, lanes *totals) { \
        tile(form, x_rows, x, w, blocks, totals); \
    }
#define TILES(form) TILE(form, 1) TILE(form, 2) TILE(form, 4) TILE(form, 8)
TILES(INT4) TILES(INT4_ZEROS) TILES(MXFP4) TILES(INT8)
#define ROW(form) {tile_##form##_1, tile_##form##_2, tile_##form##_4, tile_##form##_8}
static const tile_of tile_functions[FORMS][4] = {  // by form and rows of x
    [INT4] = ROW(INT4), [INT4_ZEROS] = ROW(INT4_ZEROS), [MXFP4] = ROW(MXFP4), [INT8] = ROW(INT8)};

typedef struct {
    coded w;
    fixed_rows x;  // padded to the rows of a tile
    const scalar *bias;
    char *y;
    long rows, outputs, units_per_piece;
    int which, wide_output;  // which: index of the tile by rows of x
} arguments;

static void multiply_units(const void *given, long piece) {
    const arguments *a = given;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    const int w_rows = W_ROWS(1 << a->which);
    lanes totals[FEW_ROWS * W_UNIT];
    float sums[W_UNIT + LANES];  // some lanes after the last sum are read but not used
    rows_of_w rows;
    memset(totals, 0, sizeof *totals * W_UNIT << a->which);
    const long end = W_UNIT * a->units_per_piece * (piece + 1);
    for (long begin = W_UNIT * a->units_per_piece * piece; begin < end && begin < a->outputs; begin += W_UNIT) {
        const long count = a->outputs - begin < W_UNIT ? a->outputs - begin : W_UNIT;
        for (long n = 0; n < count; n += w_rows) {
            for (int i = 0; i < w_rows; i++) {
                const long row = begin + (n + i < count ? n + i : count - 1);
                rows.codes[i] = a->w.codes + row * a->w.blocks * BLOCK_BYTES(a->w.form);
                take_row(&a->w, row, rows.scales[i], rows.zeros[i]);
            }
            tile_functions[a->w.form][a->which](&a->x, &rows, a->w.blocks, totals + n);
        }
        for (long m = 0; m < a->rows; m++) {
            sums_of_16(totals + m * W_UNIT, sums);
            finish(sums, 0, a->bias ? a->bias + begin : NULL, a->outputs, count, 0, a->wide_output, a->y + (m * a->outputs + begin) * size);
        }
    }
}

typedef struct {
    fixed_rows into;
    const scalar *x;
    long rows, columns, x_stride;
} fixing;

static void fix_one(const void *given, long m) {
    const fixing *f = given;
    fix_row(&f->into, m, m < f->rows ? f->x + m * f->x_stride : NULL, f->columns);
}

// 1 if this CPU decodes codes with vector instructions, so that they are faster than bf16.
#if defined(WIDE) || (LANES == 8 && defined(__AVX2__))
const int NAME(coded_is_fast) = 1;
#else
const int NAME(coded_is_fast) = 0;
#endif

// y [rows][outputs] = x w^T + bias. codes [outputs][blocks]; scales and zeros (or NULL) [outputs][groups]. A group has `group` columns, which are whole
// blocks unless it is the only group of a row. wide_output: y is fp32 for every scalar type. Returns 1 if there is no memory.
int NAME(coded_linear)(const scalar *x, const uint8_t *codes, const void *scales, const uint8_t *zeros, const scalar *bias, void *y, long rows,
                       long outputs, long columns, long x_stride, long group, int form, int scale_type, int wide_output, int threads) {
    const long blocks = (columns + BLOCK - 1) / BLOCK, groups = (columns + group - 1) / group;
    const long blocks_per_group = groups == 1 ? blocks : group / BLOCK;
    const int exact_form = form == INT4 && zeros ? INT4_ZEROS : form;
    const coded w = {codes, zeros, scales, blocks, groups, blocks_per_group, 1, blocks_per_group, exact_form, scale_type};
    if (rows > FEW_ROWS) return NAME(coded_gemm)(x, &w, bias, y, rows, outputs, columns, x_stride, wide_output, threads);
    const int which = rows > 4 ? 3 : rows > 2 ? 2 : (int)rows - 1;
    const long steps = (blocks + STEP_BLOCKS - 1) / STEP_BLOCKS, scales_stride = (blocks + LANES - 1) / LANES * LANES;
    const long values_stride = (steps + 1) * STEP_VALUES;  // padded: rows a multiple of 4 KiB apart would compete for the cache
    int16_t *fixed = shared_scratch((values_stride * sizeof *fixed + scales_stride * sizeof(float)) << which);
    if (!fixed) return 1;
    const fixing f = {{fixed, (float *)(fixed + (values_stride << which)), steps, values_stride, scales_stride}, x, rows, columns, x_stride};
    share(fix_one, &f, 1l << which, 1);
    const long unit_bytes = W_UNIT * blocks * BLOCK_BYTES(form), units = (outputs + W_UNIT - 1) / W_UNIT;
    const long even = units * unit_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long per_piece = 1 + piece_bytes / (unit_bytes + 1);
    const arguments a = {w, f.into, bias, y, rows, outputs, per_piece, which, wide_output};
    const reading reads = {.begin = (const char *)codes, .bytes_of_piece = per_piece * unit_bytes};
    share_reading(multiply_units, &a, sizeof a, reads, (units + per_piece - 1) / per_piece, threads);
    return 0;
}
