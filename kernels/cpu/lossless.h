// Weights in 12 bits that equal bf16 to the bit. Each value has its low byte, and the index of its high byte (sign and seven bits of the exponent) in a
// palette of 16, which eight rows share. High bytes that are not in the palette, the escapes, are listed separately.
//
// A row is divided into groups of 128 columns in 192 bytes: 64 bytes of indices, two in each, then 128 low bytes. Of every 16 low bytes the first eight
// belong to one run of 32 columns and the others to the next. So joining bytes within 16, which is one instruction, leaves columns in order: with AVX-512
// and its bf16 products, a group takes 13 instructions, products included. The last group of a row is padded; if it has at most 64 columns, it omits the
// last 64 low bytes.
#pragma once
#include "lanes.h"

#define GROUP 128
#define HALF_GROUP (GROUP / 2)
#define GROUP_BYTES (GROUP * 3 / 2)
#define PALETTE 16
#define PALETTE_ROWS 8
#define MOST_DECODED 1024  // columns that are decoded at a time
#define MOST_COLUMNS (1l << 20)

typedef struct {
    const uint8_t *codes;     // [rows][row_bytes]; NULL if the weight is plain
    const uint8_t *palettes;  // [(rows + 7) / 8][16]
    const int32_t *starts;    // [(rows + 7) / 8 + 1]: the start in `escapes` of those of each palette's rows
    const uint32_t *escapes;  // row % 8 << 29 | column << 8 | high byte, ordered by row and column
    long row_bytes;
} coded;

// Returns the bytes of all whole groups and of the last partial one.
INLINE long coded_row_bytes(long columns) {
    const long rest = columns % GROUP;
    return columns / GROUP * GROUP_BYTES + (rest > HALF_GROUP ? GROUP_BYTES : rest ? GROUP : 0);
}

// Returns a row's codes from `column` on, the first of a group.
INLINE const uint8_t *codes_at(const coded *w, long row, long column) { return w->codes + row * w->row_bytes + column / GROUP * GROUP_BYTES; }

INLINE const uint8_t *palette_of(const coded *w, long row) { return w->palettes + row / PALETTE_ROWS * PALETTE; }

// Returns the column within a group whose low byte is at index `place`.
INLINE long column_at(long place) { return place / 64 * 64 + place % 16 / 8 * 32 + place % 64 / 16 * 8 + place % 8; }

#ifdef WIDE
typedef __m512i palette;
INLINE palette load_palette(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }

// to[i] = columns 32 * i .. of one or both halves of a group.
INLINE void decode_group(const int halves, const uint8_t *from, palette high, __m512i *to) {
    const __m512i places = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
#pragma GCC unroll 2
    for (int i = 0; i < halves; i++) {
        const __m512i found = _mm512_shuffle_epi8(high, _mm512_and_si512(i ? _mm512_srli_epi16(places, 4) : places, low));
        const __m512i bytes = _mm512_loadu_si512(from + 64 + 64 * i);
        to[2 * i] = _mm512_unpacklo_epi8(bytes, found);
        to[2 * i + 1] = _mm512_unpackhi_epi8(bytes, found);
    }
}

INLINE void store_group(const int halves, const uint8_t *from, palette high, bf16 *to) {
    __m512i columns[4];
    decode_group(halves, from, high, columns);
#pragma GCC unroll 4
    for (int i = 0; i < 2 * halves; i++) _mm512_storeu_si512(to + 32 * i, columns[i]);
}
#elif defined(__AVX2__)
typedef __m256i palette;
INLINE palette load_palette(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }

INLINE void store_group(const int halves, const uint8_t *from, palette high, bf16 *to) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int part = 0; part < 2; part++) {
        const __m256i places = _mm256_loadu_si256((const __m256i *)(from + 32 * part));
        for (int i = 0; i < halves; i++) {
            const __m256i found = _mm256_shuffle_epi8(high, _mm256_and_si256(i ? _mm256_srli_epi16(places, 4) : places, low));
            const __m256i bytes = _mm256_loadu_si256((const __m256i *)(from + 64 + 64 * i + 32 * part));
            _mm256_storeu_si256((__m256i *)(to + 64 * i + 16 * part), _mm256_unpacklo_epi8(bytes, found));
            _mm256_storeu_si256((__m256i *)(to + 64 * i + 16 * part + 32), _mm256_unpackhi_epi8(bytes, found));
        }
    }
}
#else
typedef const uint8_t *palette;
INLINE palette load_palette(const uint8_t *p) { return p; }

INLINE void store_group(const int halves, const uint8_t *from, palette high, bf16 *to) {
    for (long i = 0; i < halves * HALF_GROUP; i++) to[column_at(i)] = (bf16)(high[from[i % 64] >> i / 64 * 4 & 15] << 8 | from[64 + i]);
}
#endif

INLINE long column_of(uint32_t escape) { return escape >> 8 & (2 * MOST_COLUMNS - 1); }

// Returns the lowest possible escape at `column` of a row. Earlier escapes are below it.
INLINE uint32_t bound_of(long row, long column) { return (uint32_t)(row % PALETTE_ROWS) << 29 | (uint32_t)column << 8; }

// The next escape, and the end of the escapes of its palette's rows.
typedef struct {
    const uint32_t *next, *end;
} escapes;

// Returns the escapes of a row from `column` on, and of the palette's later rows.
INLINE escapes escapes_at(const coded *w, long row, long column) {
    const int32_t *starts = w->starts + row / PALETTE_ROWS;
    const uint32_t *from = w->escapes + starts[0], bound = bound_of(row, column);
    long count = starts[1] - starts[0], below = 0;
    const uint32_t *end = from + count;
    while (count > 16) {
        const long half = count / 2;
        if (from[half] < bound) from += half + 1, count -= half + 1;
        else count = half;
    }
    for (long i = 0; i < count; i++) below += from[i] < bound;  // without branches that could be mispredicted
    return (escapes){from + below, end};
}

// Returns a decoded value with the high byte of its escape.
INLINE scalar with_high_byte(scalar value, uint32_t high) {
#ifdef SCALAR_BF16
    return (scalar)(high << 8 | (value & 255));
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return widen((bf16)(high << 8 | (bits >> 16 & 255)));
#endif
}

// Decodes `depth` columns of a row from `column` on, which must be the first of a group; also the rest of the last group. `left`: the row's escapes from
// there on; moves to the first one after these columns.
INLINE void decode_bits(const coded *w, long row, long column, long depth, escapes *left, bf16 *to) {
    const uint8_t *from = codes_at(w, row, column);
    const palette high = load_palette(palette_of(w, row));
    long k = 0;
    for (; k + HALF_GROUP < depth; k += GROUP, from += GROUP_BYTES) store_group(2, from, high, to + k);
    if (k < depth) store_group(1, from, high, to + k);
    for (; left->next != left->end && *left->next < bound_of(row, column + depth); left->next++) {
        bf16 *at = to + column_of(*left->next) - column;
        *at = (bf16)((*left->next & 255) << 8 | (*at & 255));
    }
}

// As decode_bits, for several rows, which are written `stride` apart and each have their escapes in `left`. `depth` is at most MOST_DECODED.
static __attribute__((noinline, unused)) void decode_rows(const coded *w, long row, long rows, long column, long depth, escapes *left, scalar *to,
                                                          long stride) {
    for (long end = row + rows; row < end; row++, left++, to += stride) {
#ifdef SCALAR_BF16
        decode_bits(w, row, column, depth, left, to);
#else
        bf16 bits[MOST_DECODED];
        decode_bits(w, row, column, depth, left, bits);
        for (long k = 0; k < (depth + HALF_GROUP - 1) / HALF_GROUP * HALF_GROUP; k += LANES) store(to + k, load_bf16(bits + k));
#endif
    }
}
