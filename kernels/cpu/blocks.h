// Weights in the format of GGUF files: rows of blocks, each with codes and scales (ggml's ggml-common.h has the layouts).
//
// Blocks are decoded a strip at a time. A strip has as many rows of w as a vector has lanes, one row per lane. A vector of codes has four columns of each
// row, as unsigned bytes. Each group of 32 or 16 columns has a vector of scales and, for some kinds, one of added numbers: a value is (code - zero) *
// scale + added. A kind is a row of `block_kinds` and a case of `decode_small` or `decode_large`; no other code depends on the kind. In fp32 a value has
// the same bits as in ggml, because scale, added and code times scale are exact.
#pragma once
#include "lanes.h"

#if defined(__x86_64__) && !defined(WIDE)
#include <immintrin.h>
#endif

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4, BLOCK_KINDS };  // in the order of kernels/matrices/blocks.py

static const struct {
    int columns, bytes;  // per block
    int group;           // columns that share a scale
    int bits, zero;      // bits of a code, and the code of the value 0
    int has_added;
} block_kinds[BLOCK_KINDS] = {
    [Q4_0] = {32, 18, 32, 4, 8, 0},   [Q4_1] = {32, 20, 32, 4, 0, 1},   [Q5_0] = {32, 22, 32, 5, 16, 0},    [Q5_1] = {32, 24, 32, 5, 0, 1},
    [Q8_0] = {32, 34, 32, 8, 128, 0}, [IQ4_NL] = {32, 18, 32, 8, 128, 0}, [Q3_K] = {256, 110, 16, 3, 4, 0}, [Q4_K] = {256, 144, 32, 4, 0, 1},
    [Q5_K] = {256, 176, 32, 5, 0, 1}, [Q6_K] = {256, 210, 16, 6, 32, 0},  [MXFP4] = {32, 17, 32, 5, 12, 0},
};

#define CHUNK 512  // columns of a strip that are decoded at a time: with eight rows of x they stay in the first-level cache

typedef struct {
    lanes_u32 codes[CHUNK / 4];
    lanes scales[CHUNK / 16], added[CHUNK / 32];
} strip;

#ifdef WIDE
#define UNPACK(width, half, a, b) ((lanes_u32)_mm512_unpack##half##_epi##width((__m512i)(a), (__m512i)(b)))
#elif LANES == 8 && defined(__AVX2__)
#define UNPACK(width, half, a, b) ((lanes_u32)_mm256_unpack##half##_epi##width((__m256i)(a), (__m256i)(b)))
#endif

#ifdef UNPACK
// Transposes words within each 128 bits: to[i] = word i of a[0 .. 3].
INLINE void turn_words(const lanes_u32 *a, lanes_u32 *to) {
    const lanes_u32 b[4] = {UNPACK(32, lo, a[0], a[1]), UNPACK(32, hi, a[0], a[1]), UNPACK(32, lo, a[2], a[3]), UNPACK(32, hi, a[2], a[3])};
    to[0] = UNPACK(64, lo, b[0], b[2]), to[1] = UNPACK(64, hi, b[0], b[2]);
    to[2] = UNPACK(64, lo, b[1], b[3]), to[3] = UNPACK(64, hi, b[1], b[3]);
}
#endif

// to[i] = word i of the four words from byte `at` of each row on.
INLINE void turn(const uint8_t *const *rows, long at, lanes_u32 *to) {
#ifdef UNPACK
    lanes_u32 a[4];
    for (int i = 0; i < 4; i++) {
#define QUARTER(lane) _mm_loadu_si128((const __m128i *)(rows[i + (lane)] + at))
#ifdef WIDE
        const __m512i half = _mm512_inserti32x4(_mm512_castsi128_si512(QUARTER(0)), QUARTER(4), 1);
        a[i] = (lanes_u32)_mm512_inserti32x4(_mm512_inserti32x4(half, QUARTER(8), 2), QUARTER(12), 3);
#else
        a[i] = (lanes_u32)_mm256_inserti128_si256(_mm256_castsi128_si256(QUARTER(0)), QUARTER(4), 1);
#endif
#undef QUARTER
    }
    turn_words(a, to);
#else
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t words[4];
        memcpy(words, rows[lane] + at, sizeof words);
        for (int i = 0; i < 4; i++) to[i][lane] = words[i];
    }
#endif
}

// As `turn`, for eight words.
INLINE void turn_twice(const uint8_t *const *rows, long at, lanes_u32 *to) {
#ifdef WIDE  // 32 instructions instead of 40
    lanes_u32 a[4], upper[4], lower[4];
#define HALF(row) _mm256_loadu_si256((const __m256i *)(rows[row] + at))
    for (int i = 0; i < 4; i++) a[i] = (lanes_u32)_mm512_inserti64x4(_mm512_castsi256_si512(HALF(i)), HALF(i + 4), 1);
    turn_words(a, upper);
    for (int i = 0; i < 4; i++) a[i] = (lanes_u32)_mm512_inserti64x4(_mm512_castsi256_si512(HALF(i + 8)), HALF(i + 12), 1);
    turn_words(a, lower);
#undef HALF
    for (int i = 0; i < 4; i++) {
        to[i] = (lanes_u32)_mm512_shuffle_i32x4((__m512i)upper[i], (__m512i)lower[i], 0x88);
        to[i + 4] = (lanes_u32)_mm512_shuffle_i32x4((__m512i)upper[i], (__m512i)lower[i], 0xdd);
    }
#else
    turn(rows, at, to), turn(rows, at + 16, to + 4);
#endif
}

// Converts the lower 16 bits of each word from fp16 to fp32.
INLINE lanes halves_of(lanes_u32 words) {
#ifdef WIDE
    return (lanes)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif LANES == 8 && defined(__F16C__)
    return (lanes)_mm256_cvtph_ps((__m128i)__builtin_convertvector(words, lanes_u16));
#else
    const lanes_u32 magnitude = (words & 0x7fff) << 13, is_special = (lanes_u32)((words & 0x7c00) == 0x7c00);
    const lanes_u32 ordinary = (lanes_u32)((lanes)magnitude * 0x1p112f), special = magnitude | 0x7f800000;
    return (lanes)((special & is_special) | (ordinary & ~is_special) | (words & 0x8000) << 16);
#endif
}

INLINE lanes byte_of(lanes_u32 words, int i) { return __builtin_convertvector((lanes_i32)(words >> 8 * i & 255), lanes); }

INLINE lanes signed_byte_of(lanes_u32 words, int i) { return __builtin_convertvector((lanes_i32)(words << (24 - 8 * i)) >> 24, lanes); }

static const uint8_t iq4_nl_codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 plus each value
static const uint8_t mxfp4_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 12 plus twice each value

INLINE lanes_u32 looked_up(const uint8_t *table, lanes_u32 places) {
#ifdef WIDE
    return (lanes_u32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)places);
#elif LANES == 8 && defined(__AVX2__)
    return (lanes_u32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)places);
#else
    uint8_t bytes[4 * LANES];
    memcpy(bytes, &places, sizeof bytes);
    for (int i = 0; i < 4 * LANES; i++) bytes[i] = table[bytes[i]];
    memcpy(&places, bytes, sizeof bytes);
    return places;
#endif
}

// Returns half of the power of two whose exponent, as in fp32, is the lowest byte of each word.
INLINE lanes half_power_of(lanes_u32 words) {
    const lanes_u32 exponent = words & 255, is_tiny = (lanes_u32)(exponent < 2);
    return (lanes)((0x200000u * (exponent + 1) & is_tiny) | ((exponent - 1) << 23 & ~is_tiny));
}

// Fetches part number `part` of `parts` of LANES blocks, one of each row, which follow one another from `from` on. A CPU loses fetches beyond the few that
// it keeps in flight: one thread of Zen 5 reads Q6_K at 12 GB/s if it fetches a block of each row at once, as gcc reorders it without the barrier, and at
// 34 in small parts.
INLINE void fetch(const int kind, const uint8_t *from, const int part, const int parts) {
    const int lines = (LANES * block_kinds[kind].bytes + 63) / 64;
#pragma GCC unroll 32
    for (int i = lines * part / parts; i < lines * (part + 1) / parts; i++) __builtin_prefetch(from + 64 * i, 0, 3);
    if (parts > 1) __asm__ volatile("" ::: "memory");
}

// Shifts each word left by `up` bits, or right if `up` is negative.
INLINE lanes_u32 shifted(lanes_u32 words, const int up) { return up < 0 ? words >> -up : words << up; }

#define NIBBLES 0x0f0f0f0fu
#define PAIRS 0x03030303u
#define ONES 0x01010101u

// A block is decoded in parts: of 32 columns, or of 64 or 128 in blocks of 256.
INLINE int columns_of_part(const int kind) { return block_kinds[kind].columns == 32 ? 32 : block_kinds[kind].has_added ? 64 : 128; }

// The bytes of a part's codes. `high`: upper bits of Q5_0 and Q5_1 in the first vector, of other kinds in eight.
typedef struct {
    lanes_u32 raw[16], high[8];
} raw_part;

// Loads the scales of the block at byte `at` of its rows, and the upper bits that its parts share.
INLINE void load_scales(const int kind, const uint8_t *const *rows, long at, lanes *scales, lanes *added, raw_part *part) {
    lanes_u32 head[4], of_scales[4];
    if (block_kinds[kind].columns == 32) {
        turn(rows, at, head);
        *scales = kind == MXFP4 ? half_power_of(head[0]) : halves_of(head[0]);
        if (block_kinds[kind].has_added) *added = halves_of(head[0] >> 16);
        part->high[0] = kind == Q5_0 ? head[0] >> 16 | head[1] << 16 : head[1];
    } else if (block_kinds[kind].has_added) {  // Q4_K and Q5_K: scales and minima of eight groups, six bits each, in twelve bytes
        turn(rows, at, head);
        of_scales[0] = head[1] & 0x3f3f3f3fu, of_scales[1] = (head[3] & NIBBLES) | (head[1] >> 6 & PAIRS) << 4;
        of_scales[2] = head[2] & 0x3f3f3f3fu, of_scales[3] = (head[3] >> 4 & NIBBLES) | (head[2] >> 6 & PAIRS) << 4;
        const lanes scale = halves_of(head[0]), least = -halves_of(head[0] >> 16);
        for (int i = 0; i < 8; i++) scales[i] = scale * byte_of(of_scales[i / 4], i % 4), added[i] = least * byte_of(of_scales[2 + i / 4], i % 4);
        if (kind == Q5_K) turn_twice(rows, at + 16, part->high);
    } else if (kind == Q6_K) {
        turn(rows, at + 192, of_scales);
        turn(rows, at + 194, head);  // starts two bytes early, because the block ends after its last word
        const lanes scale = halves_of(head[3] >> 16);
        for (int i = 0; i < 16; i++) scales[i] = scale * signed_byte_of(of_scales[i / 4], i % 4);
    } else {  // Q3_K: sixteen scales of six bits, stored plus 32
        turn(rows, at + 94, head);  // starts two bytes before the scales
        const lanes_u32 a = head[0] >> 16 | head[1] << 16, b = head[1] >> 16 | head[2] << 16, c = head[2] >> 16 | head[3] << 16;
        of_scales[0] = (a & NIBBLES) | (c & PAIRS) << 4, of_scales[1] = (b & NIBBLES) | (c >> 2 & PAIRS) << 4;
        of_scales[2] = (a >> 4 & NIBBLES) | (c >> 4 & PAIRS) << 4, of_scales[3] = (b >> 4 & NIBBLES) | (c >> 6 & PAIRS) << 4;
        const lanes scale = halves_of(head[3] >> 16);
        for (int i = 0; i < 16; i++) scales[i] = scale * (byte_of(of_scales[i / 4], i % 4) - 32.0f);
        turn_twice(rows, at, part->high);
    }
}

// Loads the bytes of part number `number`.
INLINE void load_part_of_block(const int kind, const int number, const uint8_t *const *rows, long at, raw_part *part) {
    if (kind == Q6_K) {
        turn_twice(rows, at + 64 * number, part->raw), turn_twice(rows, at + 64 * number + 32, part->raw + 8);
        turn_twice(rows, at + 128 + 32 * number, part->high);
    } else if (block_kinds[kind].columns == 32 && kind != Q8_0) {
        turn(rows, at + block_kinds[kind].bytes - 16, part->raw);
    } else {
        turn_twice(rows, at + (kind == Q8_0 ? 2 : kind == Q4_K ? 16 : kind == Q5_K ? 48 : 32) + 32 * number, part->raw);
    }
}

// Returns vector i of the codes of part number `number`.
INLINE lanes_u32 codes_of_part(const int kind, const int number, const raw_part *part, const int i) {
    const lanes_u32 *raw = part->raw, *high = part->high;
    switch (kind) {
        case Q8_0: return raw[i] ^ 0x80808080u;
        case IQ4_NL: return looked_up(iq4_nl_codes, raw[i & 3] >> (i & 4) & NIBBLES);
        case MXFP4: return looked_up(mxfp4_codes, raw[i & 3] >> (i & 4) & NIBBLES);
        case Q5_0:
        case Q5_1: return (raw[i & 3] >> (i & 4) & NIBBLES) | ((high[0] >> 4 * i & 15) * 0x204081u & ONES) << 4;  // moves bit j to byte j
        case Q3_K: return (raw[i & 7] >> 2 * (i / 8) & PAIRS) | (shifted(high[i & 7], 2 - (4 * number + i / 8)) & ONES << 2);
        case Q4_K: return raw[i & 7] >> (i & 8 ? 4 : 0) & NIBBLES;
        case Q5_K: return (raw[i & 7] >> (i & 8 ? 4 : 0) & NIBBLES) | (shifted(high[i & 7], 4 - (2 * number + i / 8)) & ONES << 4);
        case Q6_K: return (raw[i & 15] >> (i & 16 ? 4 : 0) & NIBBLES) | (shifted(high[i & 7], 4 - 2 * (i / 8)) & PAIRS << 4);
        default: return raw[i & 3] >> (i & 4) & NIBBLES;
    }
}

// Decodes columns first .. first + count of LANES rows; `first` must be a multiple of CHUNK. Fetches the same columns of the next rows, which start at
// `ahead`.
INLINE void decode_strip(const int kind, const uint8_t *const *rows, long first, long count, const uint8_t *ahead, strip *to) {
    const int columns = block_kinds[kind].columns, bytes = block_kinds[kind].bytes;
    long at = first / columns * bytes;
    for (long i = 0; i < count; i += columns, at += bytes) {
        raw_part part;
        load_scales(kind, rows, at, to->scales + i / block_kinds[kind].group, to->added + i / 32, &part);
        const int per_part = columns_of_part(kind);
#pragma GCC unroll 4
        for (int number = 0; number < columns / per_part; number++) {
            load_part_of_block(kind, number, rows, at, &part);
#pragma GCC unroll 32
            for (int k = 0; k < per_part / 4; k++) {
                if (k % 8 == 0) fetch(kind, ahead + LANES * at, (number * per_part + 4 * k) / 32, columns / 32);
                to->codes[(i + number * per_part) / 4 + k] = codes_of_part(kind, number, &part, k);
            }
        }
    }
}

// Up to three stacked matrices with the same number of columns.
typedef struct {
    const uint8_t *rows[3];
    long ends[3], row_bytes[3];
    int kinds[3];
} block_rows;

INLINE block_rows rows_of_blocks(const uint8_t *first, const uint8_t *second, const uint8_t *third, long rows_of_first, long rows_of_second,
                                 long rows_of_third, long kinds, long columns) {
    block_rows w = {.rows = {first, second, third},
                    .ends = {rows_of_first, rows_of_first + rows_of_second, rows_of_first + rows_of_second + rows_of_third}};
    for (int i = 0; i < 3; i++) {
        w.kinds[i] = kinds >> 8 * i & 255;
        w.row_bytes[i] = columns / block_kinds[w.kinds[i]].columns * block_kinds[w.kinds[i]].bytes;
    }
    return w;
}

INLINE const uint8_t *block_row(const block_rows *w, long row, int *kind) {
    const int i = row < w->ends[0] ? 0 : row < w->ends[1] ? 1 : 2;
    *kind = w->kinds[i];
    return w->rows[i] + (row - (i ? w->ends[i - 1] : 0)) * w->row_bytes[i];
}

// Fills `rows` with the addresses of up to `count` rows from `row` on that belong to one matrix; lanes after the last row repeat its address. Returns the
// number of rows.
INLINE long rows_of_strip(const block_rows *w, long row, long count, const uint8_t **rows, int *kind) {
    const uint8_t *first = block_row(w, row, kind);
    const int i = row < w->ends[0] ? 0 : row < w->ends[1] ? 1 : 2;
    const long left = w->ends[i] - row, taken = left < count ? left : count;
    for (long lane = 0; lane < LANES; lane++) rows[lane] = first + (lane < taken ? lane : taken - 1) * w->row_bytes[i];
    return taken;
}
