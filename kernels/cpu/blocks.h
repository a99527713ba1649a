// Weights as GGUF files keep them: rows of blocks, each with its codes and what they are scaled by (ggml's ggml-common.h has the layouts).
//
// Every kind is read in the same terms: 64 columns' codes as unsigned bytes in the order of the columns, and for each 16 columns a scale and what is added,
// so that a value is code * scale + added. A kind is a row of `block_sizes`, a case of `codes_of` and one of `scales_of_blocks`; nothing else knows it.
// In fp32 such a value has the bits of ggml's own: scale and added are exact, and the multiply-add rounds once.
#pragma once
#include "lanes.h"

#if defined(__x86_64__) && !defined(WIDE)
#include <immintrin.h>
#endif

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q3_K, Q4_K, Q5_K, Q6_K, BLOCK_KINDS };  // as kernels/matrices/blocks.py counts them

static const struct {
    int columns, bytes;
} block_sizes[BLOCK_KINDS] = {
    [Q4_0] = {32, 18},  [Q4_1] = {32, 20},    [Q5_0] = {32, 22},   [Q5_1] = {32, 24},   [Q8_0] = {32, 34},
    [IQ4_NL] = {32, 18}, [Q3_K] = {256, 110}, [Q4_K] = {256, 144}, [Q5_K] = {256, 176}, [Q6_K] = {256, 210},
};

#define STEP_COLUMNS 64
#define SCALE_COLUMNS 16
#define HAS_LARGE_CODES(kind) ((kind) == Q8_0 || (kind) == IQ4_NL)  // pairs of which, times a byte each, leave 16 bits

typedef uint8_t bytes32 __attribute__((vector_size(32)));
typedef uint8_t bytes64 __attribute__((vector_size(64)));
typedef uint64_t quads __attribute__((vector_size(64)));
typedef float floats16 __attribute__((vector_size(64)));
typedef int32_t ints16 __attribute__((vector_size(64)));

INLINE floats16 load_16(const float *p) {
    floats16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_16(float *p, floats16 v) { memcpy(p, &v, sizeof v); }

INLINE float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &rest, 4);
    uint32_t found;
    value *= 0x1p112f;
    memcpy(&found, &value, 4);
    found |= sign | ((bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
    memcpy(&value, &found, 4);
    return value;
#endif
}

INLINE bytes64 joined(bytes32 low, bytes32 high) {
#ifdef WIDE
    return (bytes64)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
#else
    bytes64 v;
    memcpy(&v, &low, 32);
    memcpy((char *)&v + 32, &high, 32);
    return v;
#endif
}

INLINE bytes32 load_32(const uint8_t *p) {
    bytes32 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE bytes64 load_64(const uint8_t *p) {
    bytes64 v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Sixteen bytes, twice.
INLINE bytes32 repeat_16(const uint8_t *p) {
#ifdef __AVX2__
    return (bytes32)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
#else
    bytes32 v;
    memcpy(&v, p, 16);
    memcpy((char *)&v + 16, p, 16);
    return v;
#endif
}

INLINE bytes64 repeat_32(const uint8_t *p) { return joined(load_32(p), load_32(p)); }

// `value` in the bytes whose bit is set.
INLINE bytes64 where_set(uint64_t bits, uint8_t value) {
#ifdef WIDE
    return (bytes64)_mm512_maskz_set1_epi8(bits, (char)value);
#else
    quads spread;
    for (int i = 0; i < 8; i++) spread[i] = (bits >> 8 * i & 255) * 0x0101010101010101u & 0x8040201008040201u;
    return (bytes64)((bytes64)spread != 0) & value;
#endif
}

// `value` where a byte has one of the bits that `bit` has there.
INLINE bytes64 where_any(bytes64 v, bytes64 bit, uint8_t value) {
#ifdef WIDE
    return (bytes64)_mm512_maskz_set1_epi8(_mm512_test_epi8_mask((__m512i)v, (__m512i)bit), (char)value);
#else
    return (bytes64)((v & bit) != 0) & value;
#endif
}

// Bits of 64-bit lanes moved down: those of the first 32 bytes by `low`, of the others by `high`.
INLINE bytes64 moved_down(bytes64 v, int low, int high) {
    const uint64_t a = low, b = high;
    return (bytes64)((quads)v >> (quads){a, a, a, a, b, b, b, b});
}

INLINE bytes64 in_halves(uint8_t low, uint8_t high) {
    const uint64_t a = low * 0x0101010101010101u, b = high * 0x0101010101010101u;
    return (bytes64)(quads){a, a, a, a, b, b, b, b};
}

static const uint8_t iq4_nl_codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 above the values

INLINE bytes64 look_up(const uint8_t *table, bytes64 places) {
#ifdef WIDE
    return (bytes64)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)places);
#else
    for (int i = 0; i < 64; i++) places[i] = table[places[i]];
    return places;
#endif
}

// The codes of 64 columns of a row, from 64 * step on. With `is_last_half` the row ends behind the first 32, which are there twice.
INLINE bytes64 codes_of(const int kind, const uint8_t *row, long step, const int is_last_half) {
    const int bytes = block_sizes[kind].bytes;
    if (block_sizes[kind].columns == 32) {
        const uint8_t *a = row + 2 * step * bytes, *b = is_last_half ? a : a + bytes;
        if (kind == Q8_0) return joined(load_32(a + 2), load_32(b + 2)) ^ 0x80;
        const int bits = kind == Q5_0 ? 2 : kind == Q5_1 ? 4 : 0, at = bits ? bits + 4 : kind == Q4_1 ? 4 : 2;
        const bytes64 twice = joined(repeat_16(a + at), repeat_16(b + at));
        bytes64 v = (bytes64)((quads)twice >> (quads){0, 0, 4, 4, 0, 0, 4, 4}) & 15;
        if (kind == IQ4_NL) return look_up(iq4_nl_codes, v);
        if (bits) {
            uint32_t low, high;
            memcpy(&low, a + bits, 4);
            memcpy(&high, b + bits, 4);
            v |= where_set(low | (uint64_t)high << 32, 16);
        }
        return v;
    }
    const uint8_t *block = row + step / 4 * bytes;
    const int quarter = step & 3, half = quarter >> 1, odd = quarter & 1;
    switch (kind) {
        case Q4_K: return moved_down(repeat_32(block + 16 + 32 * quarter), 0, 4) & 15;
        case Q5_K: {
            const bytes64 bit = in_halves(1 << 2 * quarter, 2 << 2 * quarter);
            return (moved_down(repeat_32(block + 48 + 32 * quarter), 0, 4) & 15) | where_any(repeat_32(block + 16), bit, 16);
        }
        case Q6_K: {
            const bytes64 low = (bytes64)((quads)load_64(block + 64 * half) >> 4 * odd) & 15, bits = repeat_32(block + 128 + 32 * half);
            const bytes64 high = odd ? moved_down(bits, 0, 2) : (bytes64)((quads)bits << (quads){4, 4, 4, 4, 2, 2, 2, 2});
            return low | (high & 0x30);
        }
        default: {  // Q3_K
            const bytes64 low = moved_down(repeat_32(block + 32 + 32 * half), 4 * odd, 4 * odd + 2) & 3;
            return low | where_any(repeat_32(block), in_halves(1 << 2 * quarter, 2 << 2 * quarter), 4);
        }
    }
}

// Sixteen small whole numbers, from words of four bytes.
INLINE floats16 from_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#ifdef WIDE  // through registers: what was just stored in parts comes late when it is loaded as a whole
    return (floats16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_set_epi64x((int64_t)(c | (uint64_t)d << 32), (int64_t)(a | (uint64_t)b << 32))));
#else
    const uint32_t words[4] = {a, b, c, d};
    floats16 v;
    for (int i = 0; i < 16; i++) v[i] = (int8_t)(words[i / 4] >> i % 4 * 8);
    return v;
#endif
}

INLINE uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

// Of eight groups of Q4_K or Q5_K the scales, and behind them what is taken off: six bits each, in twelve bytes.
INLINE floats16 six_bits(const uint8_t *packed) {
    const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
    return from_words(a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4, b & 0x3f3f3f3f,
                      (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4);
}

// The sixteen scales of Q3_K, 32 above what they stand for.
INLINE floats16 six_bit_scales(const uint8_t *packed) {
    const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
    return from_words((a & 0x0f0f0f0f) | (c & 0x03030303) << 4, (b & 0x0f0f0f0f) | (c >> 2 & 0x03030303) << 4,
                      (a >> 4 & 0x0f0f0f0f) | (c >> 4 & 0x03030303) << 4, (b >> 4 & 0x0f0f0f0f) | (c >> 6 & 0x03030303) << 4);
}

// Lanes `first` .. first + 8 of v, each twice.
INLINE floats16 twice_from(floats16 v, const int first) {
#ifdef WIDE
    const __m512i places = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (floats16)_mm512_permutexvar_ps(first ? _mm512_add_epi32(places, _mm512_set1_epi32(8)) : places, (__m512)v);
#else
    floats16 found;
    for (int i = 0; i < 16; i++) found[i] = v[first + i / 2];
    return found;
#endif
}

// Of `count` blocks of 32 columns, at most eight, from `blocks` on: the scale of each, and in the upper eight lanes the number behind it.
INLINE floats16 halves_of(const uint8_t *blocks, int bytes, long count) {
#ifdef WIDE
    const __m256i places = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bytes));
    const __m256i both = _mm256_mmask_i32gather_epi32(_mm256_setzero_si256(), (__mmask8)((1u << count) - 1), places, blocks, 1);
    const __m128i scales = _mm256_cvtepi32_epi16(both), behind = _mm256_cvtepi32_epi16(_mm256_srli_epi32(both, 16));
    return (floats16)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(scales), behind, 1));
#else
    floats16 v = {0};
    for (long i = 0; i < count; i++) v[i] = half_at(blocks + i * bytes), v[8 + i] = half_at(blocks + i * bytes + 2);
    return v;
#endif
}

// Scales, and what is added, for each 16 columns of a row from `column` on, a whole number of steps; zeros behind the last of `columns` up to a whole vector.
INLINE void scales_of_blocks(const int kind, const uint8_t *row, long column, long columns, float *scales, float *added) {
    const int bytes = block_sizes[kind].bytes;
    if (block_sizes[kind].columns == 32) {
        const float zero = kind == Q5_0 ? -16 : HAS_LARGE_CODES(kind) ? -128 : -8;
        const uint8_t *blocks = row + column / 32 * bytes;
        for (long left = columns / 32; left > 0; left -= 8, blocks += 8 * bytes, scales += 16, added += 16) {
            const floats16 found = halves_of(blocks, bytes, left < 8 ? left : 8), scale = twice_from(found, 0);
            store_16(scales, scale);
            store_16(added, kind == Q4_1 || kind == Q5_1 ? twice_from(found, 8) : scale * zero);
        }
        return;
    }
    const uint8_t *block = row + column / 256 * bytes;
    for (long left = columns; left > 0; left -= 256, block += bytes, scales += 16, added += 16) {
        if (kind == Q4_K || kind == Q5_K) {
            const floats16 found = six_bits(block + 4);
            store_16(scales, twice_from(found, 0) * half_at(block));
            store_16(added, twice_from(found, 8) * -half_at(block + 2));
            continue;
        }
        const uint8_t *of_q6 = block + 192;
        const floats16 scale = kind == Q6_K ? from_words(word_at(of_q6), word_at(of_q6 + 4), word_at(of_q6 + 8), word_at(of_q6 + 12)) * half_at(block + 208)
                                            : (six_bit_scales(block + 96) - 32.0f) * half_at(block + 108);
        store_16(scales, scale);
        store_16(added, scale * (kind == Q6_K ? -32.0f : -4.0f));
    }
}

// Up to three matrices of as many columns, one below the other.
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
        w.row_bytes[i] = columns / block_sizes[w.kinds[i]].columns * block_sizes[w.kinds[i]].bytes;
    }
    return w;
}

INLINE const uint8_t *block_row(const block_rows *w, long row, int *kind) {
    const int i = row < w->ends[0] ? 0 : row < w->ends[1] ? 1 : 2;
    *kind = w->kinds[i];
    return w->rows[i] + (row - (i ? w->ends[i - 1] : 0)) * w->row_bytes[i];
}
