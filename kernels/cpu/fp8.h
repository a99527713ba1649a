// Rows of a KV cache in FP8 (e4m3: sign, four bits of exponent, three of mantissa, up to 448; no infinity). Reading widens exactly, writing rounds to
// nearest. The caller applies scales.
#pragma once
#include "lanes.h"

typedef uint8_t lanes_u8 __attribute__((vector_size(LANES)));

INLINE lanes choose_lanes(lanes_i32 is_first, lanes first, lanes second) {
    return (lanes)(((lanes_i32)first & is_first) | ((lanes_i32)second & ~is_first));
}

// NaN stays NaN.
INLINE lanes load_fp8(const uint8_t *p) {
#ifdef WIDE  // fp16 has an exponent bias larger by eight, and seven more bits of mantissa
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((short)0xbfff));
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    return (lanes)_mm512_mask_mov_ps(value, is_nan, _mm512_set1_ps(NAN));
#else
#if LANES == 8 && defined(__AVX2__)  // gcc 12 would convert number by number
    const lanes_u32 code = (lanes_u32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), size = code & 0x7f;
#else
    lanes_u8 raw;
    memcpy(&raw, p, sizeof raw);
    const lanes_u32 code = __builtin_convertvector(raw, lanes_u32), size = code & 0x7f;
#endif
    const lanes tiny = __builtin_convertvector((lanes_i32)size, lanes) * 0x1p-9f, normal = (lanes)((size << 20) + (120u << 23));
    const lanes value = choose_lanes((lanes_i32)size < 8, tiny, normal);
    return choose_lanes((lanes_i32)size == 0x7f, all(NAN), (lanes)((lanes_u32)value | ((code & 0x80) << 24)));
#endif
}

// Rounds to nearest, ties to even. Values beyond 448 become 448; NaN stays NaN.
INLINE void store_fp8(uint8_t *p, lanes v) {
    const lanes_i32 is_nan = v != v;
    const lanes size = (lanes)((lanes_u32)v & 0x7fffffff), most = all(448.0f);
    const lanes bounded = choose_lanes(size < most, size, most);
    const lanes_u32 bits = (lanes_u32)bounded;
    // From 2^-6 on, 20 bits of mantissa are rounded off, and the exponent's bias is 7 instead of 127. Below it values are multiples of 2^-9, which is the
    // last bit of a sum with 2^14.
    const lanes_u32 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    const lanes_u32 tiny = (lanes_u32)(bounded + 16384.0f) - 0x46800000u;
    const lanes_u32 is_tiny = (lanes_u32)(bounded < all(0x1p-6f));
    const lanes_u32 code = (((tiny & is_tiny) | (normal & ~is_tiny)) & ~(lanes_u32)is_nan) | (0x7f & (lanes_u32)is_nan) | (((lanes_u32)v >> 24) & 0x80);
    const lanes_u8 raw = __builtin_convertvector(code, lanes_u8);
    memcpy(p, &raw, sizeof raw);
}

// to[i] = from[i], for n numbers, in the type used to compute.
INLINE void widen_fp8(const uint8_t *from, scalar *to, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load_fp8(from + i));
    if (i < n) {
        uint8_t padded[LANES] = {0};
        memcpy(padded, from + i, n - i);
        store_part(to + i, load_fp8(padded), n - i);
    }
}

// to[i] = from[i] / scale, for n numbers.
INLINE void narrow_fp8(const scalar *from, float scale, uint8_t *to, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_fp8(to + i, load(from + i) / scale);
    if (i < n) {
        uint8_t padded[LANES];
        store_fp8(padded, load_part(from + i, n - i) / scale);
        memcpy(to + i, padded, n - i);
    }
}
