// Rows of x in fixed point, and codes as whole numbers: the sums of their products are exact, in any order.
//
// A block of 32 columns of x is 16-bit integers times a power of two. bf16 values down to a 128th of the block's largest are exact, and smaller ones are
// off by at most 2^-15 of it; fp32 takes two such integers, which hold 29 bits. With 8 bits weights would be read no faster: int8 in groups of 32 columns
// at 36 GB/s with 16 bits and 37 with 8, on a thread of Zen 5 that can read 41.
//
// A step is four vectors, in which each of its blocks has four lanes. The vectors hold the even columns of a block's first half, the even ones of its
// second half, the odd ones of the first, and the odd ones of the second. This is the order in which shifts move four-bit codes to the low end of 16 bits.
#pragma once
#include "codes.h"

typedef int16_t halves __attribute__((vector_size(4 * LANES)));

#define HALVES (2 * LANES)
#define STEP_BLOCKS (LANES / 4)
#define LIMBS ((int)sizeof(scalar) / 2)
#define STEP_VALUES (LIMBS * 4 * HALVES)  // [limb][vector][half]

// Rows of x: values [rows][steps][STEP_VALUES]; scales [rows][blocks], padded to whole vectors.
typedef struct {
    int16_t *values;
    float *scales;
    long steps, values_stride, scales_stride;
} fixed_rows;

// Returns sum + a . b; a lane adds the products of two neighbouring halves.
INLINE lanes_i32 add_products(lanes_i32 sum, halves a, halves b) {
#if defined(WIDE) && defined(__AVX512VNNI__)
    return (lanes_i32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(WIDE)
    return sum + (lanes_i32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8 && defined(__AVX2__)
    return sum + (lanes_i32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int i = 0; i < LANES; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
#endif
}

INLINE halves load_halves(const int16_t *p) {
    halves v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Copies one number per block of a step to all lanes of the block.
INLINE lanes in_lanes_of_blocks(const float *of_blocks) {
#ifdef WIDE
    const __m512i block = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return (lanes)_mm512_permutexvar_ps(block, _mm512_castps128_ps512(_mm_loadu_ps(of_blocks)));
#elif LANES == 8
    return (lanes)_mm256_set_m128(_mm_set1_ps(of_blocks[1]), _mm_set1_ps(of_blocks[0]));
#else
    return all(of_blocks[0]);
#endif
}

INLINE uint32_t largest_bits(lanes_u32 v) {
#ifdef WIDE
    return _mm512_reduce_max_epu32((__m512i)v);
#else
    uint32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

INLINE lanes to_whole(lanes x) { return (x + 12582912.0f) - 12582912.0f; }

// Rounds a block of x, of which `columns` exist and the others are zero: writes its halves of a step's vectors, and its scale, NaN if a value is not
// finite.
INLINE void fix_block(const scalar *x, long columns, int16_t *to, float *scale) {
    lanes value[BLOCK / LANES];
    lanes_u32 most = {0};
    for (int i = 0; i < BLOCK / LANES; i++) {
        const long left = columns - i * LANES;
        value[i] = left >= LANES ? load(x + i * LANES) : left > 0 ? load_part(x + i * LANES, left) : all(0);
        const lanes_u32 bits = (lanes_u32)value[i] & 0x7fffffff, is_more = (lanes_u32)(bits > most);
        most = (bits & is_more) | (most & ~is_more);
    }
    // The largest magnitude is below 2^(power - 126). The first limb has its `top` highest bits.
    const int top = LIMBS == 1 ? 15 : 14, least = LIMBS == 1 ? 15 : 29;
    int power = (int)(largest_bits(most) >> 23);
    const int is_finite = power < 255;
    power = power < least ? least : power;
    *scale = is_finite ? from_bits((uint32_t)(power + 1 - top - (LIMBS - 1) * 15) << 23) : NAN;
    const float up = is_finite ? from_bits((uint32_t)(253 + top - power) << 23) : 0;
    int32_t whole[LIMBS][BLOCK];
    for (int i = 0; i < BLOCK / LANES; i++) {
        lanes rest = value[i] * up;
        for (int limb = 0; limb < LIMBS; limb++, rest *= 32768.0f) {
            const lanes rounded = to_whole(rest);
            const lanes_i32 integers = __builtin_convertvector(rounded, lanes_i32);
            memcpy(whole[limb] + i * LANES, &integers, sizeof integers);
            rest -= rounded;
        }
    }
    for (int limb = 0; limb < LIMBS; limb++, to += 4 * HALVES)
        for (int j = 0; j < 8; j++) {
            to[j] = (int16_t)whole[limb][2 * j], to[HALVES + j] = (int16_t)whole[limb][16 + 2 * j];
            to[2 * HALVES + j] = (int16_t)whole[limb][2 * j + 1], to[3 * HALVES + j] = (int16_t)whole[limb][17 + 2 * j];
        }
}

// Rounds `columns` values of x to row m, or writes zeros if x is NULL.
INLINE void fix_row(const fixed_rows *into, long m, const scalar *x, long columns) {
    int16_t *values = into->values + m * into->values_stride;
    float *scales = into->scales + m * into->scales_stride;
    const long room = into->steps * STEP_BLOCKS;
    for (long b = 0; b < room; b++) {
        const long left = x ? columns - b * BLOCK : 0;
        fix_block(x + b * BLOCK, left < 0 ? 0 : left < BLOCK ? left : BLOCK, values + b / STEP_BLOCKS * STEP_VALUES + b % STEP_BLOCKS * 8, scales + b);
    }
    for (long b = room; b < into->scales_stride; b++) scales[b] = 0;
}

// Loads the bytes of a step from `from` on, with zeros from `end` on.
INLINE halves load_codes(const uint8_t *codes, long from, long end) {
    const long left = end - from;
#ifdef WIDE
    __m512i v = _mm512_maskz_loadu_epi8(left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0, codes + from);
    __asm__("" : "+v"(v));  // otherwise gcc would load it again for each shift
    return (halves)v;
#else
    halves v = {0};
    memcpy(&v, codes + from, left >= (long)sizeof v ? (long)sizeof v : left > 0 ? left : 0);
    return v;
#endif
}

// Twice the values of the MXFP4 codes.
static const int16_t twice_e2m1[32] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Converts `end` bytes of a step's codes to whole numbers; the rest are zero codes, which are multiplied with zeros of x. `zero`: used by INT4_ZEROS.
INLINE void to_integers(const int form, const uint8_t *codes, long end, halves zero, halves *to) {
    const halves v = load_codes(codes, 0, end);
    if (form == INT8) {
        const halves w = load_codes(codes, sizeof v, end);
        halves half[2];
#ifdef WIDE  // joins the first halves of all blocks, then the second halves
        half[0] = (halves)_mm512_shuffle_i32x4((__m512i)v, (__m512i)w, 0x88), half[1] = (halves)_mm512_shuffle_i32x4((__m512i)v, (__m512i)w, 0xdd);
#elif LANES == 8
        const __m256 first = (__m256)v, second = (__m256)w;
        half[0] = (halves)_mm256_permute2f128_ps(first, second, 0x20), half[1] = (halves)_mm256_permute2f128_ps(first, second, 0x31);
#else
        half[0] = v, half[1] = w;
#endif
        for (int i = 0; i < 2; i++) to[i] = half[i] << 8 >> 8, to[i + 2] = half[i] >> 8;
        return;
    }
    typedef uint16_t bits __attribute__((vector_size(4 * LANES)));
#ifdef WIDE
    if (form == MXFP4) {  // the look-up uses five bits of its index, and both halves of the table are equal
        const __m512i table = _mm512_loadu_si512(twice_e2m1);
        for (int i = 0; i < 4; i++) to[i] = (halves)_mm512_permutexvar_epi16((__m512i)((bits)v >> 4 * i), table);
        return;
    }
#endif
    for (int i = 0; i < 4; i++) {
        to[i] = (halves)((bits)v >> 4 * i & 15);
        if (form != MXFP4) {
            to[i] -= form == INT4 ? (halves){0} + 8 : zero;
            continue;
        }
#if LANES == 8 && defined(__AVX2__)  // looked up as bytes, whose sign is then extended to the upper byte
        const __m256i table = _mm256_broadcastsi128_si256(_mm_packs_epi16(_mm_loadu_si128((const __m128i *)twice_e2m1),
                                                                          _mm_loadu_si128((const __m128i *)twice_e2m1 + 1)));
        to[i] = (halves)_mm256_shuffle_epi8(table, (__m256i)to[i]) << 8 >> 8;
#else
        for (int j = 0; j < HALVES; j++) to[i][j] = twice_e2m1[to[i][j]];
#endif
    }
}
