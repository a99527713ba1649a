// Weights as GGUF files keep them: rows of blocks, each with its codes and what they are scaled by (ggml's ggml-common.h has the layouts).
//
// Every kind is read in the same terms: codes as unsigned bytes in the order of the columns, a vector of them in a step, and for each 16 columns a scale and
// what is added, so that a value is code * scale + added. A kind is a row of `block_sizes`, a case of `codes_of` and one of `scales_of_blocks`; nothing else
// knows it.
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

#define SCALE_COLUMNS 16
#define HAS_LARGE_CODES(kind) ((kind) == Q8_0 || (kind) == IQ4_NL)  // pairs of which, times a byte each, leave 16 bits

INLINE uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

INLINE float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    const uint32_t rest = (uint32_t)(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &rest, 4);
    value = (bits & 0x7c00) == 0x7c00 ? (bits & 0x3ff ? NAN : INFINITY) : value * 0x1p112f;
    return bits & 0x8000 ? -value : value;
#endif
}

// Of eight groups of Q4_K or Q5_K the scales, and behind them what is taken off: six bits each, in twelve bytes.
INLINE void six_bits(const uint8_t *packed, uint32_t *words) {
    const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
    words[0] = a & 0x3f3f3f3f, words[1] = (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4;
    words[2] = b & 0x3f3f3f3f, words[3] = (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4;
}

// The sixteen scales of Q3_K, 32 above what they stand for.
INLINE void six_bit_scales(const uint8_t *packed, uint32_t *words) {
    const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
    words[0] = (a & 0x0f0f0f0f) | (c & 0x03030303) << 4, words[1] = (b & 0x0f0f0f0f) | (c >> 2 & 0x03030303) << 4;
    words[2] = (a >> 4 & 0x0f0f0f0f) | (c >> 4 & 0x03030303) << 4, words[3] = (b >> 4 & 0x0f0f0f0f) | (c >> 6 & 0x03030303) << 4;
}

static const uint8_t iq4_nl_codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 above the values

#ifdef WIDE
// A step's codes in one vector: two blocks of 32 columns, or a quarter of one of 256.
#define STEP_COLUMNS 64
typedef uint8_t code_bytes __attribute__((vector_size(64)));
typedef uint64_t quads __attribute__((vector_size(64)));

INLINE code_bytes joined(__m256i low, __m256i high) { return (code_bytes)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

INLINE __m256i load_32(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE __m256i repeat_16(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }

INLINE code_bytes repeat_32(const uint8_t *p) { return (code_bytes)_mm512_broadcast_i64x4(load_32(p)); }

// `value` where a byte has one of the bits that `bit` has there.
INLINE code_bytes where_any(code_bytes v, code_bytes bit, uint8_t value) {
    return (code_bytes)_mm512_maskz_set1_epi8(_mm512_test_epi8_mask((__m512i)v, (__m512i)bit), (char)value);
}

// Bits of 64-bit lanes moved down: those of the first 32 bytes by `low`, of the others by `high`.
INLINE code_bytes moved_down(code_bytes v, uint64_t low, uint64_t high) {
    return (code_bytes)((quads)v >> (quads){low, low, low, low, high, high, high, high});
}

INLINE code_bytes in_halves(uint8_t low, uint8_t high) {
    const uint64_t a = low * 0x0101010101010101u, b = high * 0x0101010101010101u;
    return (code_bytes)(quads){a, a, a, a, b, b, b, b};
}

// The codes of a row's columns from STEP_COLUMNS * step on. With `is_half` the row ends behind the first 32 of them, which are there twice.
INLINE code_bytes codes_of(const int kind, const uint8_t *row, long step, const int is_half) {
    const int bytes = block_sizes[kind].bytes;
    if (block_sizes[kind].columns == 32) {
        const uint8_t *a = row + 2 * step * bytes, *b = is_half ? a : a + bytes;
        if (kind == Q8_0) return joined(load_32(a + 2), load_32(b + 2)) ^ 0x80;
        const int bits = kind == Q5_0 ? 2 : kind == Q5_1 ? 4 : 0, at = bits ? bits + 4 : kind == Q4_1 ? 4 : 2;
        const code_bytes v = (code_bytes)((quads)joined(repeat_16(a + at), repeat_16(b + at)) >> (quads){0, 0, 4, 4, 0, 0, 4, 4}) & 15;
        if (kind == IQ4_NL)
            return (code_bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)iq4_nl_codes)), (__m512i)v);
        return bits ? v | (code_bytes)_mm512_maskz_set1_epi8(word_at(a + bits) | (uint64_t)word_at(b + bits) << 32, 16) : v;
    }
    const uint8_t *block = row + step / 4 * bytes;
    const int quarter = step & 3, half = quarter >> 1, odd = quarter & 1;
    switch (kind) {
        case Q4_K: return moved_down(repeat_32(block + 16 + 32 * quarter), 0, 4) & 15;
        case Q5_K: {
            const code_bytes bit = in_halves(1 << 2 * quarter, 2 << 2 * quarter);
            return (moved_down(repeat_32(block + 48 + 32 * quarter), 0, 4) & 15) | where_any(repeat_32(block + 16), bit, 16);
        }
        case Q6_K: {
            const code_bytes low = (code_bytes)((quads)_mm512_loadu_si512(block + 64 * half) >> 4 * odd) & 15, bits = repeat_32(block + 128 + 32 * half);
            const code_bytes up = (code_bytes)((quads)bits << (quads){4, 4, 4, 4, 2, 2, 2, 2}), high = odd ? moved_down(bits, 0, 2) : up;
            return low | (high & 0x30);
        }
        default: {  // Q3_K
            const code_bytes low = moved_down(repeat_32(block + 32 + 32 * half), 4 * odd, 4 * odd + 2) & 3;
            return low | where_any(repeat_32(block), in_halves(1 << 2 * quarter, 2 << 2 * quarter), 4);
        }
    }
}

// Sixteen small whole numbers, through registers: what was just stored in parts comes late when it is loaded as a whole.
INLINE __m512 from_words(const uint32_t *w) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_set_epi64x((int64_t)(w[2] | (uint64_t)w[3] << 32), (int64_t)(w[0] | (uint64_t)w[1] << 32))));
}

// Lanes 0 .. 8 of v, or with `is_upper` 8 .. 16, each twice.
INLINE __m512 twice_each(__m512 v, const int is_upper) {
    const __m512i places = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(is_upper ? _mm512_add_epi32(places, _mm512_set1_epi32(8)) : places, v);
}

// Of `count` blocks of 32 columns, at most eight, the scale of each, and in the upper eight lanes the number behind it.
INLINE __m512 halves_of(const uint8_t *blocks, int bytes, long count) {
    const __m256i places = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bytes));
    const __m256i both = _mm256_mmask_i32gather_epi32(_mm256_setzero_si256(), (__mmask8)((1u << count) - 1), places, blocks, 1);
    const __m128i scales = _mm256_cvtepi32_epi16(both), behind = _mm256_cvtepi32_epi16(_mm256_srli_epi32(both, 16));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(scales), behind, 1));
}
#else
// A step's codes are those of one block of 32 columns, or of an eighth of one of 256.
#define STEP_COLUMNS 32
typedef uint8_t code_bytes __attribute__((vector_size(32)));
typedef uint64_t quads __attribute__((vector_size(32)));

INLINE code_bytes load_32(const uint8_t *p) {
    code_bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE code_bytes shifted(code_bytes v, const int down) { return (code_bytes)(down < 0 ? (quads)v << -down : (quads)v >> down); }

INLINE code_bytes where_any(code_bytes v, code_bytes bit, uint8_t value) { return (code_bytes)((v & bit) != 0) & value; }

INLINE code_bytes codes_of(const int kind, const uint8_t *row, long step, const int is_half) {
    (void)is_half;
    const int bytes = block_sizes[kind].bytes;
    if (block_sizes[kind].columns == 32) {
        const uint8_t *block = row + step * bytes;
        if (kind == Q8_0) return load_32(block + 2) ^ 0x80;
        const int bits = kind == Q5_0 ? 2 : kind == Q5_1 ? 4 : 0, at = bits ? bits + 4 : kind == Q4_1 ? 4 : 2;
        uint64_t low, high;
        memcpy(&low, block + at, 8);
        memcpy(&high, block + at + 8, 8);
        code_bytes v = (code_bytes)((quads){low, high, low, high} >> (quads){0, 0, 4, 4}) & 15;
        if (kind == IQ4_NL) {
#ifdef __AVX2__
            const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)iq4_nl_codes));
            return (code_bytes)_mm256_shuffle_epi8(table, (__m256i)v);
#else
            for (int i = 0; i < 32; i++) v[i] = iq4_nl_codes[v[i]];
#endif
        }
        if (bits) {
            const uint64_t each = 0x0101010101010101u, bit = 0x8040201008040201u;
            const uint8_t *fifth = block + bits;
            v |= where_any((code_bytes)(quads){fifth[0] * each, fifth[1] * each, fifth[2] * each, fifth[3] * each}, (code_bytes)(quads){bit, bit, bit, bit}, 16);
        }
        return v;
    }
    const uint8_t *block = row + step / 8 * bytes;
    const int eighth = step & 7, half = eighth >> 2, place = eighth & 3;
    const code_bytes bit = (code_bytes){0} + (uint8_t)(1 << eighth);
    switch (kind) {
        case Q4_K: return shifted(load_32(block + 16 + 32 * (eighth >> 1)), 4 * (eighth & 1)) & 15;
        case Q5_K: return (shifted(load_32(block + 48 + 32 * (eighth >> 1)), 4 * (eighth & 1)) & 15) | where_any(load_32(block + 16), bit, 16);
        case Q6_K: {
            const code_bytes low = shifted(load_32(block + 64 * half + 32 * (place & 1)), 4 * (place >> 1)) & 15;
            return low | (shifted(load_32(block + 128 + 32 * half), 2 * place - 4) & 0x30);
        }
        default: return (shifted(load_32(block + 32 + 32 * half), 2 * place) & 3) | where_any(load_32(block), bit, 4);  // Q3_K
    }
}
#endif

// Scales, and what is added, for each 16 columns of a row from `column` on, a whole number of 256; behind the last of `columns` zeros are written, up to
// 16 of them.
INLINE void scales_of_blocks(const int kind, const uint8_t *row, long column, long columns, float *scales, float *added) {
    const int bytes = block_sizes[kind].bytes, has_least = kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K;
    const float zero = HAS_LARGE_CODES(kind) ? -128 : kind == Q6_K ? -32 : kind == Q5_0 ? -16 : kind == Q3_K ? -4 : -8;
    const uint8_t *block = row + column / block_sizes[kind].columns * bytes;
#ifdef WIDE
    const long step = block_sizes[kind].columns == 32 ? 8 * bytes : bytes;
    for (long left = columns; left > 0; left -= 256, block += step, scales += 16, added += 16) {
        uint32_t words[4];
        __m512 scale, least;
        if (block_sizes[kind].columns == 32) {
            const __m512 found = halves_of(block, bytes, left < 256 ? left / 32 : 8);
            scale = twice_each(found, 0), least = twice_each(found, 1);
        } else if (has_least) {
            six_bits(block + 4, words);
            const __m512 found = from_words(words);
            scale = twice_each(found, 0) * half_at(block), least = twice_each(found, 1) * -half_at(block + 2);
        } else if (kind == Q6_K) {
            for (int i = 0; i < 4; i++) words[i] = word_at(block + 192 + 4 * i);
            scale = from_words(words) * half_at(block + 208);
        } else {
            six_bit_scales(block + 96, words);
            scale = (from_words(words) - 32.0f) * half_at(block + 108);
        }
        _mm512_storeu_ps(scales, scale);
        _mm512_storeu_ps(added, has_least ? least : (__m512)(scale * zero));
    }
#else
    if (block_sizes[kind].columns == 32) {
        for (long i = 0; i < columns / 32; i++, block += bytes)
            for (int j = 0; j < 2; j++) {
                const float scale = half_at(block);
                scales[2 * i + j] = scale, added[2 * i + j] = has_least ? half_at(block + 2) : scale * zero;
            }
        for (int i = 0; i < LANES; i++) scales[columns / 16 + i] = added[columns / 16 + i] = 0;
        return;
    }
    for (long left = columns; left > 0; left -= 256, block += bytes, scales += 16, added += 16) {
        uint32_t words[4];
        int8_t small[16];
        if (has_least) six_bits(block + 4, words);
        else if (kind == Q3_K) six_bit_scales(block + 96, words);
        else memcpy(words, block + 192, sizeof words);
        memcpy(small, words, sizeof small);
        const float scale = half_at(block + (has_least ? 0 : kind == Q6_K ? 208 : 108)), least = has_least ? -half_at(block + 2) : 0;
        for (int i = 0; i < 16; i++) scales[i] = has_least ? scale * small[i / 2] : scale * (small[i] - (kind == Q3_K ? 32 : 0));
        for (int i = 0; i < 16; i++) added[i] = has_least ? least * small[8 + i / 2] : scales[i] * zero;
    }
#endif
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
