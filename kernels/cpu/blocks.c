// Matrix products with weights in a GGUF file's blocks (blocks.h), and rows of such weights: y[m][n] = x[m] . w[n] + bias[n].
//
// Each 32 columns of x become bytes with one scale, as in ggml: a value is off by at most a 254th of the largest of its 32. Codes and bytes are multiplied
// as integers, exactly. For each group of columns, in order, one fused multiply-add adds their sum times both scales to the output, and a second one adds
// the weight's minimum times the sum of x. So an output has the same bits with any other rows, in any chunk of a prompt, and on any kind of CPU.
//
// A vector holds one number of each of several rows of w. A strip of rows is decoded once, and multiplied with all rows of x.
#include "blocks.h"
#include "outputs.h"
#include "program.h"
#include "tiles.h"

#define PIECE_BYTES (32 << 10)  // bytes of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (128 << 10)  // the same if every thread takes many such pieces
#define PIECES_OF_THREAD 8
#define MOST_ROWS 512        // most rows of x that are multiplied with a strip
#define MOST_BYTES (1 << 20)  // limit of their bytes, so that they stay in the second-level cache
#define WIDTH 16             // rows of x in a panel, padded with zeros after the last row: as many as a matrix tile takes
#define FEWEST_IN_TILES 7
#define SUMS (3 * LANES)     // sums of one row of x: those of two strips, and some that are read but not used

// Thirty-two columns of one row of x.
typedef struct {
    int8_t values[32];
    float scale, sum;           // sum: the sum of the values times their scale
    int32_t whole, first_half;  // sums of all values and of the first sixteen
} byte_block;

// Rows of x, in panels of `width`: [panels][columns / 32][width].
typedef struct {
    byte_block *blocks;
    long rows, width, columns;
} byte_rows;

// Returns the blocks of row m from column `column` on.
INLINE byte_block *blocks_at(const byte_rows *x, long m, long column) {
    return x->blocks + (m / x->width * (x->columns / 32) + column / 32) * x->width + m % x->width;
}

// The first rows of two strips of w, and their numbers of rows, which may be 0.
typedef struct {
    long begin[2], count[2];
} pair_of_strips;

void multiply_pair(const block_rows *w, const byte_rows *x, pair_of_strips pair, long apart, float *sums);
void decode_row(int kind, const uint8_t *const *rows, long first, long count, strip *to);

#ifdef SCALAR_BF16  // compiled only once
#ifdef WIDE
#define AVX(name) _mm512_##name
typedef __m512i integers;
#elif LANES == 8 && defined(__AVX2__)
#define AVX(name) _mm256_##name
typedef __m256i integers;
#endif

#if defined(WIDE) && defined(__AVX512VNNI__)
#define ADD_PRODUCTS(sum, codes, bytes) ((lanes_i32)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(codes), _mm512_set1_epi32(bytes)))
#elif LANES == 8 && defined(__AVXVNNI__)
#define ADD_PRODUCTS(sum, codes, bytes) ((lanes_i32)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(codes), _mm256_set1_epi32(bytes)))
#elif !defined(AVX)
INLINE lanes_i32 add_products(lanes_i32 sum, lanes_u32 codes, int32_t bytes) {
    for (int i = 0; i < 4; i++) sum += (lanes_i32)(codes >> 8 * i & 255) * (int8_t)(bytes >> 8 * i);
    return sum;
}
#define ADD_PRODUCTS(sum, codes, bytes) add_products(sum, codes, bytes)
#endif

INLINE lanes fused(lanes a, lanes b, lanes sum) {
#ifdef WIDE
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

INLINE int32_t four_bytes(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return four;
}

INLINE void keep(lanes total, long kept, float *sums) {
    if (kept == LANES) store_f32(sums, total);
    else memcpy(sums, &total, kept * sizeof *sums);
}

// dots[m] += codes . x[m], over `fours` times four columns.
INLINE void add_dots(const int bits, const int x_rows, const int fours, const lanes_u32 *codes, const byte_block *x, const int first, lanes_i32 *dots) {
#ifdef ADD_PRODUCTS
    (void)bits;
#pragma GCC unroll 8
    for (int i = 0; i < fours; i++)
#pragma GCC unroll 8
        for (int m = 0; m < x_rows; m++) dots[m] = ADD_PRODUCTS(dots[m], codes[i], four_bytes(x[m].values + first + 4 * i));
#else  // pairs of products are added up in 16 bits while they fit: a product is at most 127 times the largest code
    // Codes of eight bits do not fit: their lowest bits are added up in 16 bits, the upper seven bits at once in 32.
    const int most = bits == 5 ? 4 : bits == 6 ? 2 : 8;
    const integers ones = AVX(set1_epi16)(1);
    integers pairs[8];
#pragma GCC unroll 8
    for (int i = 0; i < fours; i++) {
        const integers low = (integers)(bits == 8 ? codes[i] & ONES : codes[i]), upper = (integers)(codes[i] >> 1 & 0x7f7f7f7fu);
#pragma GCC unroll 8
        for (int m = 0; m < x_rows; m++) {
            const integers bytes = AVX(set1_epi32)(four_bytes(x[m].values + first + 4 * i)), products = AVX(maddubs_epi16)(low, bytes);
            pairs[m] = i % most ? AVX(add_epi16)(pairs[m], products) : products;
            if ((i + 1) % most == 0 || i + 1 == fours) dots[m] += (lanes_i32)AVX(madd_epi16)(pairs[m], ones);
            if (bits == 8) dots[m] += (lanes_i32)AVX(madd_epi16)(AVX(maddubs_epi16)(upper, bytes), AVX(set1_epi16)(2));
        }
    }
#endif
}

// sums[m] = or += x[m] . w, over `count` columns. Consecutive blocks of a row of x are `width` blocks apart.
INLINE void rows_by_strip(const int kind, const int x_rows, const strip *w, const byte_block *x, long width, long count, int goes_on, long kept, float *sums) {
    const int group = block_kinds[kind].group, parts = 32 / group;
    lanes total[8];
#pragma GCC unroll 8
    for (int m = 0; m < x_rows; m++) total[m] = goes_on ? load_f32(sums + m * SUMS) : all(0);
    for (long i = 0; i < count / 32; i++, x += width) {
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            const long at = i * parts + part;
            lanes_i32 dots[8];
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) {
                const int32_t sum = parts == 1 ? x[m].whole : part ? x[m].whole - x[m].first_half : x[m].first_half;
                dots[m] = (lanes_i32){0} - sum * block_kinds[kind].zero;
            }
            add_dots(block_kinds[kind].bits, x_rows, group / 4, w->codes + at * group / 4, x, part * group, dots);
#pragma GCC unroll 8
            for (int m = 0; m < x_rows; m++) {
                total[m] = fused(__builtin_convertvector(dots[m], lanes), w->scales[at] * x[m].scale, total[m]);
                if (block_kinds[kind].has_added) total[m] = fused(w->added[at], all(x[m].sum), total[m]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < x_rows; m++) keep(total[m], kept, sums + m * SUMS);
}

// As decode_strip and rows_by_strip, for one row of x and all its columns: codes are multiplied as they are decoded, and not stored. By chunks of columns
// one thread of Zen 5 would read Q4_K at half the speed: the next rows are fetched in order, not by chunks.
INLINE void row_by_blocks(const int kind, const uint8_t *const *rows, const uint8_t *ahead, long count, const byte_block *x, long kept, float *sums) {
    const int columns = block_kinds[kind].columns, bytes = block_kinds[kind].bytes, group = block_kinds[kind].group, per_part = columns_of_part(kind);
    lanes total = all(0);
    for (long i = 0, at = 0; i < count; i += columns, at += bytes, x += columns / 32) {
        raw_part part;
        lanes scales[16], added[8];
        load_scales(kind, rows, at, scales, added, &part);
#pragma GCC unroll 4
        for (int number = 0; number < columns / per_part; number++) {
            load_part_of_block(kind, number, rows, at, &part);
#pragma GCC unroll 8
            for (int k = 0; k < per_part; k += group) {
                const int column = number * per_part + k;
                fetch(kind, ahead + LANES * at, column / group, columns / group);
                const byte_block *block = x + column / 32;
                const int32_t sum = group == 32 ? block->whole : column & 16 ? block->whole - block->first_half : block->first_half;
                lanes_i32 dots = (lanes_i32){0} - sum * block_kinds[kind].zero;
                lanes_u32 codes[8];
#pragma GCC unroll 8
                for (int j = 0; j < group / 4; j++) codes[j] = codes_of_part(kind, number, &part, k / 4 + j);
                add_dots(block_kinds[kind].bits, 1, group / 4, codes, block, column & 16 & (group - 32), &dots);
                total = fused(__builtin_convertvector(dots, lanes), scales[column / group] * block->scale, total);
                if (block_kinds[kind].has_added) total = fused(added[column / 32], all(block->sum), total);
            }
        }
    }
    keep(total, kept, sums);
}

#ifdef BYTE_TILES
// As rows_by_strip, for the WIDTH rows of a panel.
INLINE void panel_by_strip(const int kind, const strip *w, const byte_block *x, long count, int goes_on, long kept, float *sums) {
    const int group = block_kinds[kind].group, has_added = block_kinds[kind].has_added;
    const long groups = count / group;
    int32_t dots[2][WIDTH * LANES] __attribute__((aligned(64)));
    lanes total[WIDTH];
#pragma GCC unroll 16
    for (int m = 0; m < WIDTH; m++) total[m] = goes_on ? load_f32(sums + m * SUMS) : all(0);
// While the tile of one group is added, that of the next is multiplied: a product takes 50 cycles.
#define MULTIPLY(tile, a, b, i) \
    do { \
        clear_tile(tile); \
        load_tile(a, x[(i) * group / 32 * WIDTH].values + (i) * group % 32, sizeof *x); \
        load_tile(b, w->codes + (i) * group / 4, sizeof(lanes)); \
        if (block_kinds[kind].zero) multiply_byte_tiles(tile, a, b); \
        else multiply_with_unsigned_tiles(tile, a, b); \
    } while (0)
#define ADD(tile, a, b, i, next) \
    do { \
        store_tile(tile, dots[tile], sizeof(lanes)); \
        if ((i) + 1 < groups) MULTIPLY(next, a, b, (i) + 1); \
        const byte_block *x_block = x + (i) * group / 32 * WIDTH; \
        _Pragma("GCC unroll 16") for (int m = 0; m < WIDTH; m++) { \
            const lanes dot = (lanes)_mm512_cvtepi32_ps(_mm512_load_si512(dots[tile] + m * LANES)); \
            total[m] = fused(dot, w->scales[i] * x_block[m].scale, total[m]); \
            if (has_added) total[m] = fused(w->added[i], all(x_block[m].sum), total[m]); \
        } \
    } while (0)
    MULTIPLY(0, 4, 6, 0);
    for (long i = 0; i < groups; i += 2) {
        ADD(0, 5, 7, i, 1);
        if (i + 1 < groups) ADD(1, 4, 6, i + 1, 0);
    }
#undef ADD
#undef MULTIPLY
#pragma GCC unroll 16
    for (int m = 0; m < WIDTH; m++) keep(total[m], kept, sums + m * SUMS);
}
#endif

INLINE void multiply(const int kind, const strip *w, const byte_block *x, long rows, long width, long count, int goes_on, long kept, float *sums) {
#ifdef BYTE_TILES
    if (has_tiles && width == WIDTH) {
        panel_by_strip(kind, w, x, count, goes_on, kept, sums);
        return;
    }
#endif
    long m = 0;
#define ROWS(number) \
    for (; m + number <= rows; m += number) rows_by_strip(kind, number, w, x + m, width, count, goes_on, kept, sums + m * SUMS)
    if (LANES == 16) ROWS(8);
    ROWS(4);
    ROWS(2);
    ROWS(1);
#undef ROWS
}

typedef void (*decoding)(const uint8_t *const *rows, long first, long count, const uint8_t *ahead, strip *to);
typedef void (*multiplying_one)(const uint8_t *const *rows, const uint8_t *ahead, long count, const byte_block *x, long lanes_kept, float *sums);
typedef void (*multiplying)(const strip *w, const byte_block *x, long rows, long width, long count, int goes_on, long lanes_kept, float *sums);

#define KIND(kind) \
    static void decode_##kind(const uint8_t *const *rows, long first, long count, const uint8_t *ahead, strip *to) { \
        decode_strip(kind, rows, first, count, ahead, to); \
    } \
    static void multiply_one_##kind(const uint8_t *const *rows, const uint8_t *ahead, long count, const byte_block *x, long kept, float *sums) { \
        row_by_blocks(kind, rows, ahead, count, x, kept, sums); \
    } \
    static void multiply_##kind(const strip *w, const byte_block *x, long rows, long width, long count, int goes_on, long kept, float *sums) { \
        multiply(kind, w, x, rows, width, count, goes_on, kept, sums); \
    }
KIND(Q4_0) KIND(Q4_1) KIND(Q5_0) KIND(Q5_1) KIND(Q8_0) KIND(IQ4_NL) KIND(Q3_K) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K) KIND(MXFP4)
#define EACH_KIND(of) \
    {[Q4_0] = of##_Q4_0,     [Q4_1] = of##_Q4_1, [Q5_0] = of##_Q5_0, [Q5_1] = of##_Q5_1, [Q8_0] = of##_Q8_0, \
     [IQ4_NL] = of##_IQ4_NL, [Q3_K] = of##_Q3_K, [Q4_K] = of##_Q4_K, [Q5_K] = of##_Q5_K, [Q6_K] = of##_Q6_K, \
     [MXFP4] = of##_MXFP4}
static const decoding decode[BLOCK_KINDS] = EACH_KIND(decode);
static const multiplying multiply_by_kind[BLOCK_KINDS] = EACH_KIND(multiply);
static const multiplying_one multiply_one_by_kind[BLOCK_KINDS] = EACH_KIND(multiply_one);

// sums [x->rows][SUMS] = x . w, for the rows of two strips; the second strip's sums start LANES after the first's. The next pair of strips of the same
// matrix is `apart` rows further, and is fetched.
void multiply_pair(const block_rows *w, const byte_rows *x, pair_of_strips pair, long apart, float *sums) {
    struct {
        const uint8_t *rows[LANES], *ahead;
        long kept, place;
        int kind;
        strip strip;
    } parts[6];  // the rows of a strip may belong to three matrices
    int num_parts = 0, shape = 0;
    for (int i = 0; i < 2; i++)
        for (long n = 0; n < pair.count[i]; n += parts[num_parts++].kept) {
            const uint8_t **rows = parts[num_parts].rows;
            parts[num_parts].kept = rows_of_strip(w, pair.begin[i] + n, pair.count[i] - n, rows, &parts[num_parts].kind);
            parts[num_parts].ahead = rows[0] + apart * (rows[1] - rows[0]), parts[num_parts].place = i * LANES + n;
        }
    if (x->rows == 1) {
        for (int i = 0; i < num_parts; i++)
            multiply_one_by_kind[parts[i].kind](parts[i].rows, parts[i].ahead, x->columns, x->blocks, parts[i].kept, sums + parts[i].place);
        return;
    }
    for (long column = 0; column < x->columns; column += CHUNK) {
        const long count = x->columns - column < CHUNK ? x->columns - column : CHUNK;
        for (int i = 0; i < num_parts; i++) {
            decode[parts[i].kind](parts[i].rows, column, count, parts[i].ahead, &parts[i].strip);
#ifdef BYTE_TILES
            const int zero = block_kinds[parts[i].kind].zero;
            lanes_u32 *codes = parts[i].strip.codes;
            if (zero && has_tiles && x->width == WIDTH)  // tiles take signed codes
                for (long k = 0; k < count / 4; k++) codes[k] = (lanes_u32)_mm512_sub_epi8((__m512i)codes[k], _mm512_set1_epi8((char)zero));
#endif
        }
        for (long m = 0; m < x->rows; m += x->width)
            for (int i = 0; i < num_parts; i++) {
                const long rows = x->rows - m < x->width ? x->rows - m : x->width;
#ifdef BYTE_TILES
                const int group = block_kinds[parts[i].kind].group;
                if (x->width == WIDTH && shape != group) shape_tiles(shape = group);
#endif
                multiply_by_kind[parts[i].kind](&parts[i].strip, blocks_at(x, m, column), rows, x->width, count, column > 0, parts[i].kept,
                                                sums + m * SUMS + parts[i].place);
            }
    }
    if (shape) end_tiles();
}

void decode_row(int kind, const uint8_t *const *rows, long first, long count, strip *to) { decode[kind](rows, first, count, rows[0], to); }
#endif


// Rounds 32 columns of x to bytes. The scale is NaN if a value is not finite.
INLINE void round_block(const scalar *x, byte_block *to) {
    lanes value[32 / LANES];
    lanes_u32 most = {0};
    for (int i = 0; i < 32 / LANES; i++) {
        value[i] = load(x + i * LANES);
        const lanes_u32 bits = (lanes_u32)value[i] & 0x7fffffff, is_more = (lanes_u32)(bits > most);
        most = (bits & is_more) | (most & ~is_more);
    }
#ifdef WIDE
    const uint32_t bits = _mm512_reduce_max_epu32((__m512i)most);
#else
    uint32_t bits = most[0];
    for (int i = 1; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
#endif
    float largest;
    memcpy(&largest, &bits, 4);
    const int is_finite = bits < 0x7f800000u, is_tiny = largest < 0x1p-100f;  // is_tiny: the inverse of the scale would be infinite
    const float scale = !is_finite ? NAN : is_tiny ? 0 : largest / 127.0f, up = is_finite && !is_tiny ? 127.0f / largest : 0;
    to->whole = to->first_half = 0;
    for (int i = 0; i < 32 / LANES; i++) {
        const lanes_i32 whole = __builtin_convertvector((is_finite ? value[i] * up : all(0)) + 12582912.0f - 12582912.0f, lanes_i32);
#ifdef WIDE
        _mm_storeu_si128((__m128i *)(to->values + i * LANES), _mm512_cvtepi32_epi8((__m512i)whole));
        const int32_t sum = _mm512_reduce_add_epi32((__m512i)whole);
#else
        int32_t sum = 0;
        for (int j = 0; j < LANES; j++) to->values[i * LANES + j] = (int8_t)whole[j], sum += whole[j];
#endif
        to->whole += sum;
        if (i < 16 / LANES) to->first_half += sum;
    }
    to->scale = scale, to->sum = scale * to->whole;
}

typedef struct {
    byte_rows into;
    const scalar *x;
    long x_stride;
} rounding;

static void round_row(const void *given, long m) {
    const rounding *r = given;
    for (long column = 0; column < r->into.columns; column += 32) {
        byte_block *to = blocks_at(&r->into, m, column);
        if (m < r->into.rows) round_block(r->x + m * r->x_stride + column, to);
        else memset(to, 0, sizeof *to);
    }
}

typedef struct {
    block_rows w;
    byte_rows x;
    const scalar *bias;
    char *y;
    long outputs, pairs_per_piece;
    int activation, wide_output;
} arguments;

static void multiply_pairs(const void *given, long piece) {
    const arguments *a = given;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    const long per_pair = a->activation ? LANES : 2 * LANES, end = per_pair * a->pairs_per_piece * (piece + 1);
    float sums[MOST_ROWS][SUMS] __attribute__((aligned(64)));
    for (long begin = per_pair * a->pairs_per_piece * piece; begin < end && begin < a->outputs; begin += per_pair) {
        const long count = a->outputs - begin < per_pair ? a->outputs - begin : per_pair, first = count < LANES ? count : LANES;
        const pair_of_strips pair = {{begin, a->activation ? a->outputs + begin : begin + LANES}, {first, a->activation ? first : count - first}};
        multiply_pair(&a->w, &a->x, pair, per_pair, sums[0]);
        for (long m = 0; m < a->x.rows; m++)
            finish(sums[m], LANES, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                   a->y + (m * a->outputs + begin) * size);
    }
}

// y [rows][outputs] = x w^T + bias. w is up to three stacked matrices with the given numbers of rows; kinds has one byte for the kind of each. With an
// activation w has twice the rows: gates, then ups. wide_output: y is fp32 for every scalar type. Returns 1 if there is no
// memory.
int NAME(block_linear)(const scalar *x, const uint8_t *first, const uint8_t *second, const uint8_t *third, const scalar *bias, void *y, long rows,
                       long columns, long x_stride, long rows_of_first, long rows_of_second, long rows_of_third, long kinds, int activation,
                       int wide_output, int threads) {
    const block_rows w = rows_of_blocks(first, second, third, rows_of_first, rows_of_second, rows_of_third, kinds, columns);
    const long outputs = w.ends[2] / (activation ? 2 : 1);
    const long width = rows < FEWEST_IN_TILES ? rows : WIDTH, whole = (rows + width - 1) / width * width, row_size = columns / 32 * sizeof(byte_block);
    const long fitting = MOST_BYTES / row_size / WIDTH * WIDTH, most = fitting < 64 ? 64 : fitting > MOST_ROWS ? MOST_ROWS : fitting;
    byte_block *blocks = shared_scratch((whole < most ? whole : most) * row_size);
    if (!blocks) return 1;
    const long row_bytes = w.row_bytes[0], per_pair = activation ? LANES : 2 * LANES, pairs = (outputs + per_pair - 1) / per_pair;
    const long pair_bytes = 2 * LANES * row_bytes, even = pairs * pair_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long pairs_per_piece = pair_bytes < piece_bytes ? piece_bytes / pair_bytes : 1;
    for (long top = 0; top < rows; top += most) {
        const long count = rows - top < most ? rows - top : most;
        const byte_rows rounded = {blocks, count, width, columns};
        const rounding r = {rounded, x + top * x_stride, x_stride};
        share(round_row, &r, whole - top < most ? whole - top : most, count < 8 ? 1 : threads);
        char *into = (char *)y + top * outputs * (wide_output ? sizeof(float) : sizeof(scalar));
        const arguments a = {w, rounded, bias, into, outputs, pairs_per_piece, activation, wide_output};
        const char *ups = activation ? (const char *)block_row(&w, outputs, &(int){0}) : NULL;
        share_reading(multiply_pairs, &a, sizeof a, (reading){(const char *)w.rows[0], ups, pairs_per_piece * per_pair * row_bytes, NULL},
                      (pairs + pairs_per_piece - 1) / pairs_per_piece, threads);
    }
    return 0;
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
    const int64_t number = p->numbers[i];
    const int is_there = number >= 0 && number < p->w.ends[2];
    const float factor = is_there ? p->scale : NAN;  // as in rows.c
    const uint8_t *rows[LANES];
    int kind;
    strip w;
    rows_of_strip(&p->w, is_there ? number : 0, 1, rows, &kind);
    for (long first = 0; first < p->columns; first += CHUNK) {
        const long count = p->columns - first < CHUNK ? p->columns - first : CHUNK;
        decode_row(kind, rows, first, count, &w);
        scalar *to = p->y + i * p->columns + first;
        for (long k = 0; k < count; k++) {
            const int code = (int)(w.codes[k / 4][0] >> 8 * (k % 4) & 255) - block_kinds[kind].zero;
            const float value = w.scales[k / block_kinds[kind].group][0] * code + (block_kinds[kind].has_added ? w.added[k / 32][0] : 0);
            to[k] = factor == 1.0f ? put(value) : put(get(put(value)) * factor);
        }
    }
}

// y [count][columns] = the rows `numbers` of w, times `scale`, a number of the scalar type. A number outside w gives a row of NaN.
void NAME(block_rows)(const uint8_t *first, const uint8_t *second, const uint8_t *third, const int64_t *numbers, void *y, long count, long columns,
                      long rows_of_first, long rows_of_second, long rows_of_third, long kinds, float scale, int threads) {
    const block_rows w = rows_of_blocks(first, second, third, rows_of_first, rows_of_second, rows_of_third, kinds, columns);
    const picking p = {w, numbers, y, columns, scale};
    share(pick_row, &p, count, threads);
}
