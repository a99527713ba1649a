// fp32 vectors as wide as the CPU's, with loads and stores of fp32 or bf16 rows.
//
// The other files use these names, and special instructions only if they gain from them. Every file is compiled twice, with SCALAR_BF16 and without it.
// The order in which a row is summed depends only on its length, so a row's result has the same bits in any batch.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "team.h"

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE 1
#define LANES 16
#elif defined(__AVX__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_i32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t lanes_u32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t lanes_u16 __attribute__((vector_size(2 * LANES)));

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE lanes all(float x) { return x - (lanes){0}; }

INLINE lanes load_f32(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(float *p, lanes v) { memcpy(p, &v, sizeof v); }

INLINE lanes widen_lanes(lanes_u16 v) {
#ifdef WIDE  // gcc 12 would widen two halves and join them, with 8 lanes in six instructions instead of two
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#elif defined(__AVX2__)
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#else
    return (lanes)(__builtin_convertvector(v, lanes_u32) << 16);
#endif
}

INLINE lanes load_bf16(const bf16 *p) {
    lanes_u16 v;
    memcpy(&v, p, sizeof v);
    return widen_lanes(v);
}

INLINE lanes_u16 narrow_lanes(lanes v) {
#if defined(WIDE) && defined(__AVX512BF16__)  // the same bits, except that subnormal numbers become zero
    return (lanes_u16)(__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    lanes_u32 bits = (lanes_u32)v, is_nan = (lanes_u32)(v != v);
    lanes_u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#ifdef WIDE
    return (lanes_u16)_mm512_cvtepi32_epi16((__m512i)((rounded & ~is_nan) | (0x7fc0 & is_nan)));
#else
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), lanes_u16);
#endif
#endif
}

INLINE void store_bf16(bf16 *p, lanes v) {
    lanes_u16 raw = narrow_lanes(v);
    memcpy(p, &raw, sizeof raw);
}

#ifdef SCALAR_BF16
typedef bf16 scalar;
#define NAME(op) op##_bf16
#define load load_bf16
#define store store_bf16
#define get widen
#define put narrow
// Rounds `v` to the storage type and back: fused operations round where separate ones would.
INLINE lanes as_stored(lanes v) { return widen_lanes(narrow_lanes(v)); }
#else
typedef float scalar;
#define NAME(op) op##_f32
#define load load_f32
#define store store_f32
#define get(x) (x)
#define put(x) (x)
INLINE lanes as_stored(lanes v) { return v; }
#endif

// Loads the first n < LANES numbers of a row; the other lanes are zero.
INLINE lanes load_part(const scalar *p, long n) {
    scalar padded[LANES] = {0};
    memcpy(padded, p, n * sizeof *p);
    return load(padded);
}

INLINE void store_part(scalar *p, lanes v, long n) {
    scalar padded[LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof *p);
}

// A piece is as many numbers of a dot product as one multiply-add takes.
#if defined(SCALAR_BF16) && defined(WIDE) && defined(__AVX512BF16__)
typedef __m512i piece;
#define PIECE 32
INLINE piece load_piece(const scalar *p) { return _mm512_loadu_si512(p); }
INLINE piece part_of_piece(const scalar *p, long n) { return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p); }
INLINE lanes multiply_add(lanes sum, piece a, piece b) { return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
// If a vector holds several outputs of a product, each of its lanes sums PER_LANE neighbours, which are adjacent in `packed`.
#define PER_LANE 2
typedef bf16 packed;
INLINE packed to_packed(scalar x) { return x; }
INLINE piece load_packed(const packed *p) { return _mm512_loadu_si512(p); }
INLINE void store_packed(packed *p, lanes v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }
INLINE piece repeated(const packed *p) {
    int32_t neighbours;
    memcpy(&neighbours, p, 4);
    return _mm512_set1_epi32(neighbours);
}
INLINE piece repeated_scalars(const scalar *p) { return repeated(p); }
#else
typedef lanes piece;
#define PIECE LANES
INLINE piece load_piece(const scalar *p) { return load(p); }
INLINE piece part_of_piece(const scalar *p, long n) { return load_part(p, n); }
INLINE lanes multiply_add(lanes sum, piece a, piece b) { return sum + a * b; }
#define PER_LANE 1
typedef float packed;
INLINE packed to_packed(scalar x) { return get(x); }
INLINE piece load_packed(const packed *p) { return load_f32(p); }
INLINE void store_packed(packed *p, lanes v) { store_f32(p, v); }
INLINE piece repeated(const packed *p) { return all(*p); }
INLINE piece repeated_scalars(const scalar *p) { return all(get(*p)); }
#endif

#define IS_WIDENED (sizeof(packed) > sizeof(scalar))  // 1: bf16 is multiplied as fp32

#ifdef WIDE
// to[i] = the i-th 32 bits of each of rows a[0 .. 15].
INLINE void transpose_16(__m512i *a, __m512i *to) {
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        to[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
        to[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
    }
}
#endif

// to[i][lane] = rows[lane][column + i * PER_LANE ..] for LANES rows and LANES values of i. Lines of `to` are `stride` apart.
INLINE void pack_square(const scalar *const *rows, long column, packed *to, long stride) {
#if defined(WIDE) && (PER_LANE == 2 || !defined(SCALAR_BF16))
    __m512i a[16], turned[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + column);
    transpose_16(a, turned);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * stride, turned[i]);
#else
    for (long lane = 0; lane < LANES; lane++)
        for (long i = 0; i < LANES; i++)
            for (long j = 0; j < PER_LANE; j++) to[i * stride + lane * PER_LANE + j] = to_packed(rows[lane][column + i * PER_LANE + j]);
#endif
}

// to[i][j] = from[j][i] for LANES lines and LANES columns. Lines are from_stride and to_stride apart.
INLINE void transpose(const float *from, long from_stride, float *to, long to_stride) {
#ifdef WIDE
    __m512i a[16], turned[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose_16(a, turned);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, turned[i]);
#else
    for (long i = 0; i < LANES; i++)
        for (long j = 0; j < LANES; j++) to[i * to_stride + j] = from[j * from_stride + i];
#endif
}

// to[i][j] = from[j][i], for LANES lines i and LANES * PER_LANE columns j.
INLINE void transpose_packed(const packed *from, long from_stride, packed *to, long to_stride) {
#if PER_LANE == 2
    __m512i a[16], turned[16];
    for (int i = 0; i < 16; i++, from += 2 * from_stride) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + from_stride)));
        a[i] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    transpose_16(a, turned);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, turned[i]);
#else
    transpose(from, from_stride, to, to_stride);
#endif
}

// to[lane][j] = v[j][lane], for PER_LANE vectors j.
INLINE void store_together(packed *to, const lanes *v) {
#if PER_LANE == 2
    static const uint16_t neighbours[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(neighbours), halves));
#else
    store_f32(to, v[0]);
#endif
}

INLINE int are_all(lanes v, float x) {
#ifdef WIDE
    return _mm512_cmpneq_ps_mask((__m512)v, _mm512_set1_ps(x)) == 0;
#else
    int are = 1;
    for (int i = 0; i < LANES; i++) are &= v[i] == x;
    return are;
#endif
}

// Returns v in lanes begin .. end, and minus infinity in the others.
INLINE lanes only_between(lanes v, long begin, long end) {
    lanes_i32 lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const lanes_i32 is_in = (lane >= (int32_t)(begin < 0 ? 0 : begin)) & (lane < (int32_t)(end > LANES ? LANES : end));
    return (lanes)(((lanes_i32)v & is_in) | ((lanes_i32)all(-INFINITY) & ~is_in));
}

// Adds one half to the other until one number is left, in the same order as sums_of_16.
INLINE float sum_of(lanes v) {
#ifdef WIDE
    return _mm512_reduce_add_ps((__m512)v);
#elif LANES == 8
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
#endif
}

INLINE float max_of(lanes v) {
#ifdef WIDE
    return _mm512_reduce_max_ps((__m512)v);
#else
    float part[LANES];
    memcpy(part, &v, sizeof v);
    float most = part[0];
    for (int i = 1; i < LANES; i++) most = part[i] > most ? part[i] : most;
    return most;
#endif
}

INLINE lanes larger_of(lanes a, lanes b) {
#ifdef WIDE
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
    lanes_i32 is_larger = a > b;
    return (lanes)(((lanes_i32)a & is_larger) | ((lanes_i32)b & ~is_larger));
#endif
}

// sums[i] = sum_of(v[i]). Transposing while adding takes 45 instructions; sixteen separate sums take 160.
INLINE void sums_of_16(const lanes *v, float *sums) {
#ifdef WIDE
    __m512 halves[8], quarters[4], pairs[2];
    for (int i = 0; i < 8; i++) {
        __m512 a = (__m512)v[i], b = (__m512)v[i + 8];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; i++) {
        __m512 a = halves[i], b = halves[i + 4];
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; i++) {
        __m512 a = quarters[i], b = quarters[i + 2];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    __m512 all_sums = _mm512_add_ps(_mm512_unpacklo_ps(pairs[0], pairs[1]), _mm512_unpackhi_ps(pairs[0], pairs[1]));
    _mm512_storeu_ps(sums, _mm512_shuffle_f32x4(all_sums, all_sums, 0xd8));
#else
    for (int i = 0; i < 16; i++) sums[i] = sum_of(v[i]);
#endif
}

// Returns e^r for |r| up to half of ln 2. The coefficients are those of Cephes' expf.
INLINE lanes exp_polynomial(lanes r) {
    lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// Returns 2^x to 3 ulp for x up to 127; below -126 it returns 2^-126; NaN stays NaN. The polynomial is of the fraction of x, and its coefficients minimise
// the largest relative error, 1e-7.
INLINE lanes exp2_of(lanes x) {
#ifdef WIDE  // for a NaN and a number, the maximum is the second operand
    const lanes bounded = (lanes)_mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);
    const lanes r = (lanes)_mm512_reduce_ps((__m512)bounded, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const lanes_i32 is_low = x < all(-126.0f);
    const lanes bounded = (lanes)(((lanes_i32)x & ~is_low) | ((lanes_i32)all(-126.0f) & is_low));
    const lanes nearest = (bounded + 12582912.0f) - 12582912.0f;  // a whole number
    const lanes n = nearest - (lanes)((lanes_i32)all(1.0f) & (nearest > bounded)), r = bounded - n;
#endif
    lanes p = all(1.8671300926e-3f);
    p = p * r + 9.0170302738e-3f;
    p = p * r + 5.5799913139e-2f;
    p = p * r + 2.4016445015e-1f;
    p = p * r + 6.9315131181e-1f;
    p = p * r + 1.0f;
#ifdef WIDE
    return (lanes)_mm512_scalef_ps((__m512)p, (__m512)bounded);
#else
    return p * (lanes)((__builtin_convertvector(n, lanes_i32) + 127) << 23);
#endif
}

// Returns e^x to 2 ulp; 0 below -87, where the result would be subnormal; infinity above 88.7; NaN stays NaN.
INLINE lanes exp_of(lanes x) {
#ifdef WIDE  // scaling by 2^n is one instruction here; for a NaN and a number, the minimum is the second operand
    const lanes bounded = (lanes)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);
    const __m512 n = _mm512_roundscale_ps((__m512)(bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const lanes r = (bounded - (lanes)n * 0.693359375f) + (lanes)n * 2.12194440e-4f;
    const __m512 result = _mm512_scalef_ps((__m512)exp_polynomial(r), n);
    return (lanes)_mm512_mask_mov_ps(result, _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ), _mm512_setzero_ps());
#else
    const lanes least = all(-87.0f), most = all(88.8f);
    lanes_i32 low = x < least, high = x > most;
    lanes bounded = (lanes)(((lanes_i32)x & ~low & ~high) | ((lanes_i32)least & low) | ((lanes_i32)most & high));
    lanes n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;  // the nearest whole number
    lanes r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes p = exp_polynomial(r);
    lanes_i32 k = __builtin_convertvector(n, lanes_i32);
    lanes_i32 half = k >> 1;  // 2^128 is not a float, so 2^k is two factors
    lanes result = p * (lanes)((half + 127) << 23) * (lanes)((k - half + 127) << 23);
    return (lanes)(((lanes_i32)result & ~low));
#endif
}
