// Weights in codes of four or eight bits: the codes of a row in blocks of 32 columns, and a scale for each group of blocks (kernels/matrices/int4.py,
// mxfp4.py and int8.py have the layouts).
//
// A code without its scale is a number that bf16 represents exactly. A product sums the products of these numbers as far as one scale applies, and
// multiplies the sum by the scale. (So it is more exact than a product with the weight unpacked to bf16.) With a few rows of x the products are of
// integers (fixed_point.h), with more of bf16 or fp32.
#pragma once
#include "lanes.h"

#define BLOCK 32  // columns of a block
#define PIECES (BLOCK / PIECE)
#define MOST_STEPS 2048  // C supports at least so many steps in a row

enum { INT4, INT4_ZEROS, MXFP4, INT8, FORMS };
enum { SCALES_F32, SCALES_BF16, SCALES_F16, SCALES_E8M0 };

#define BLOCK_BYTES(form) ((form) == INT8 ? BLOCK : BLOCK / 2)

// A weight [rows, columns]. A step is a number of blocks that share a scale and are summed together.
typedef struct {
    const uint8_t *codes, *zeros;
    const char *scales;
    long blocks, groups, blocks_per_group, step, steps_per_group;
    int form, scale_type;
} coded;

// Returns the same weight with steps of `most` blocks, or of one block if `most` does not divide them.
INLINE coded in_steps(coded w, long most) {
    w.step = w.blocks % most == 0 && w.blocks_per_group % most == 0 ? most : 1;
    w.steps_per_group = w.blocks_per_group / w.step;
    return w;
}

#if PER_LANE == 2  // numbers as bits of bf16
#define VALUE(bits, number) bits
typedef __m512i table;
INLINE table load_table(const packed *values) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values)); }
#else
#define VALUE(bits, number) number
#ifdef WIDE
typedef lanes table;
INLINE table load_table(const packed *values) { return load_f32(values); }
#elif LANES == 8 && defined(__AVX2__)
typedef struct {
    __m256 low, high;
} table;
INLINE table load_table(const packed *values) { return (table){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
#else
typedef const packed *table;
INLINE table load_table(const packed *values) { return values; }
#endif
#endif

// -16 .. 15. The values of the codes 0 .. 15 start at index 16 - zero.
static const packed whole_numbers[32] = {
    VALUE(0xc180, -16), VALUE(0xc170, -15), VALUE(0xc160, -14), VALUE(0xc150, -13), VALUE(0xc140, -12), VALUE(0xc130, -11), VALUE(0xc120, -10),
    VALUE(0xc110, -9),  VALUE(0xc100, -8),  VALUE(0xc0e0, -7),  VALUE(0xc0c0, -6),  VALUE(0xc0a0, -5),  VALUE(0xc080, -4),  VALUE(0xc040, -3),
    VALUE(0xc000, -2),  VALUE(0xbf80, -1),  VALUE(0x0000, 0),   VALUE(0x3f80, 1),   VALUE(0x4000, 2),   VALUE(0x4040, 3),   VALUE(0x4080, 4),
    VALUE(0x40a0, 5),   VALUE(0x40c0, 6),   VALUE(0x40e0, 7),   VALUE(0x4100, 8),   VALUE(0x4110, 9),   VALUE(0x4120, 10),  VALUE(0x4130, 11),
    VALUE(0x4140, 12),  VALUE(0x4150, 13),  VALUE(0x4160, 14),  VALUE(0x4170, 15),
};
static const packed e2m1[16] = {
    VALUE(0x0000, 0.0f),  VALUE(0x3f00, 0.5f),  VALUE(0x3f80, 1.0f),  VALUE(0x3fc0, 1.5f),  VALUE(0x4000, 2.0f),  VALUE(0x4040, 3.0f),
    VALUE(0x4080, 4.0f),  VALUE(0x40c0, 6.0f),  VALUE(0x8000, -0.0f), VALUE(0xbf00, -0.5f), VALUE(0xbf80, -1.0f), VALUE(0xbfc0, -1.5f),
    VALUE(0xc000, -2.0f), VALUE(0xc040, -3.0f), VALUE(0xc080, -4.0f), VALUE(0xc0c0, -6.0f),
};
#undef VALUE

// Returns the values of four-bit codes in a group with this zero; MXFP4 has one table, INT8 none.
INLINE table table_of(const int form, long zero) {
    if (form == MXFP4) return load_table(e2m1);
    return load_table(whole_numbers + 16 - (form == INT4_ZEROS ? zero : 8));
}

// Decodes a block to pieces, in the order of its columns. Byte j of four-bit codes has column j in its low half and column j + 16 in its high half.
INLINE void decode(const int form, const uint8_t *codes, table values, piece *to) {
#if PER_LANE == 2
    if (form == INT8) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes + 1)));
        to[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        return;
    }
    // The look-up uses five bits of its 16-bit index. Both halves of the table are equal, so a bit of the other column has no effect.
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes)));
    to[0] = _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, shift), values);
#elif defined(WIDE)
    if (form == INT8) {
        for (int i = 0; i < 2; i++) to[i] = (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes + i)));
        return;
    }
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));  // the look-up uses four bits of its index
    to[0] = (lanes)_mm512_permutexvar_ps(pairs, (__m512)values);
    to[1] = (lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), (__m512)values);
#elif LANES == 8 && defined(__AVX2__)
    for (int i = 0; i < PIECES; i++) {
        if (form == INT8) {
            to[i] = (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * i))));
            continue;
        }
        __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i % 2 * 8)));
        if (i >= 2) index = _mm256_srli_epi32(index, 4);
        const __m256 low = _mm256_permutevar8x32_ps(values.low, index), high = _mm256_permutevar8x32_ps(values.high, index);
        to[i] = (lanes)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));  // selects by the highest bit
    }
#else
    float plain[BLOCK];
    if (form == INT8)
        for (int j = 0; j < BLOCK; j++) plain[j] = (int8_t)codes[j];
    else
        for (int j = 0; j < BLOCK / 2; j++) plain[j] = values[codes[j] & 15], plain[j + BLOCK / 2] = values[codes[j] >> 4];
    memcpy(to, plain, sizeof plain);
#endif
}

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float scale_at(const coded *w, long index) {
    uint16_t half;
    float value;
    switch (w->scale_type) {
        case SCALES_F32: memcpy(&value, w->scales + 4 * index, 4); return value;
        case SCALES_E8M0: {
            const uint8_t power = ((const uint8_t *)w->scales)[index];
            return from_bits(power ? (uint32_t)power << 23 : 1u << 22);  // 2^-127 is subnormal
        }
    }
    memcpy(&half, w->scales + 2 * index, 2);
    if (w->scale_type == SCALES_BF16) return widen(half);
    return from_bits((uint32_t)(half & 0x7fff) << 13) * (half & 0x8000 ? -0x1p112f : 0x1p112f);
}

// Converts `count` scales from number `at` on to fp32.
INLINE void convert_scales(const coded *w, long at, long count, float *to) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (w->scale_type == SCALES_F32) {
            store_f32(to + i, load_f32((const float *)w->scales + at + i));
        } else if (w->scale_type == SCALES_BF16) {
            store_f32(to + i, load_bf16((const bf16 *)w->scales + at + i));
        } else if (w->scale_type == SCALES_F16) {
            const lanes_u32 bits = (lanes_u32)load_bf16((const bf16 *)w->scales + at + i) >> 16;
            const lanes value = (lanes)((bits & 0x7fff) << 13) * 0x1p112f;
            store_f32(to + i, (lanes)((lanes_u32)value | (bits & 0x8000) << 16));
        } else {
            for (int j = 0; j < LANES; j++) to[i + j] = scale_at(w, at + i + j);
        }
    }
    for (; i < count; i++) to[i] = scale_at(w, at + i);
}

// Writes the scales of steps first .. first + count of a row, and their zeros if the weight has any.
INLINE void scales_of(const coded *w, long row, long first, long count, float *scales, uint8_t *zeros) {
    const long per_group = w->steps_per_group, group = first / per_group, begin = row * w->groups + group;
    if (per_group == 1) {
        convert_scales(w, begin, count, scales);
        if (w->zeros) memcpy(zeros, w->zeros + begin, count);
        return;
    }
    float of_groups[MOST_STEPS];
    const long before = first - group * per_group;  // steps of the first group before `first`
    convert_scales(w, begin, (before + count + per_group - 1) / per_group, of_groups);
    for (long i = 0, j = 0, left = per_group - before; i < count; j++, left = per_group) {
        const long stop = i + left < count ? i + left : count;
        const uint8_t zero = w->zeros ? w->zeros[begin + j] : 0;
        for (; i < stop; i++) scales[i] = of_groups[j], zeros[i] = zero;
    }
}
