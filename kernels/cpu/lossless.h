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

// A vector of joined bytes has the columns of one or two pieces.
#ifdef WIDE
typedef __m512i palette, joined;
#define JOINED 32
INLINE palette load_palette(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }

// to[i] = the columns of a half of a group, from JOINED * i on.
INLINE void decode_half(const int half, const uint8_t *from, palette high, joined *to) {
    const __m512i places = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    const __m512i found = _mm512_shuffle_epi8(high, _mm512_and_si512(half ? _mm512_srli_epi16(places, 4) : places, low));
    const __m512i bytes = _mm512_loadu_si512(from + 64 + 64 * half);
    to[0] = _mm512_unpacklo_epi8(bytes, found);
    to[1] = _mm512_unpackhi_epi8(bytes, found);
}

INLINE void pieces_of(joined columns, piece *to) {
#if PER_LANE == 2
    to[0] = columns;
#else
    to[0] = widen_lanes((lanes_u16)_mm512_castsi512_si256(columns));
    to[1] = widen_lanes((lanes_u16)_mm512_extracti64x4_epi64(columns, 1));
#endif
}
#elif defined(__AVX2__)
typedef __m256i palette, joined;
#define JOINED 16
INLINE palette load_palette(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }

INLINE void decode_half(const int half, const uint8_t *from, palette high, joined *to) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256i places = _mm256_loadu_si256((const __m256i *)(from + 32 * i));
        const __m256i found = _mm256_shuffle_epi8(high, _mm256_and_si256(half ? _mm256_srli_epi16(places, 4) : places, low));
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(from + 64 + 64 * half + 32 * i));
        to[i] = _mm256_unpacklo_epi8(bytes, found);
        to[i + 2] = _mm256_unpackhi_epi8(bytes, found);
    }
}

INLINE void pieces_of(joined columns, piece *to) {
    const __m256i zero = _mm256_setzero_si256(), low = _mm256_unpacklo_epi16(zero, columns), high = _mm256_unpackhi_epi16(zero, columns);
    to[0] = (piece)_mm256_permute2x128_si256(low, high, 0x20);
    to[1] = (piece)_mm256_permute2x128_si256(low, high, 0x31);
}
#else
typedef const uint8_t *palette;
typedef piece joined;
#define JOINED LANES
INLINE palette load_palette(const uint8_t *p) { return p; }

INLINE void decode_half(const int half, const uint8_t *from, palette high, joined *to) {
    bf16 bits[HALF_GROUP];
    for (long i = 0; i < HALF_GROUP; i++) bits[column_at(i)] = (bf16)(high[from[i] >> 4 * half & 15] << 8 | from[64 + 64 * half + i]);
    for (long i = 0; i < HALF_GROUP / LANES; i++) to[i] = load_bf16(bits + i * LANES);
}

INLINE void pieces_of(joined columns, piece *to) { to[0] = columns; }
#endif

// Stores the columns of one or both halves of a group.
INLINE void store_group(const int halves, const uint8_t *from, palette high, packed *to) {
    joined columns[HALF_GROUP / JOINED];
    piece pieces[JOINED / PIECE];
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        decode_half(half, from, high, columns);
#pragma GCC unroll 16
        for (int i = 0; i < HALF_GROUP / JOINED; i++, to += JOINED) {
            pieces_of(columns[i], pieces);
#pragma GCC unroll 2
            for (int e = 0; e < JOINED / PIECE; e++) memcpy(to + e * PIECE, &pieces[e], sizeof pieces[e]);
        }
    }
}

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
INLINE packed with_high_byte(packed value, uint32_t high) {
#if PER_LANE == 2
    return (packed)(high << 8 | (value & 255));
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return widen((bf16)(high << 8 | (bits >> 16 & 255)));
#endif
}

// Decodes `depth` columns of each of several rows from `column` on, which must be the first of a group; also the rest of the last group. Rows are
// written `stride` apart. `left`: each row's escapes from there on; moves to the first one after these columns.
static __attribute__((noinline, unused)) void decode_rows(const coded *w, long row, long rows, long column, long depth, escapes *left, packed *to,
                                                          long stride) {
    for (long end = row + rows; row < end; row++, left++, to += stride) {
        const uint8_t *from = codes_at(w, row, column);
        const palette high = load_palette(palette_of(w, row));
        long k = 0;
        for (; k + HALF_GROUP < depth; k += GROUP, from += GROUP_BYTES) store_group(2, from, high, to + k);
        if (k < depth) store_group(1, from, high, to + k);
        for (; left->next != left->end && *left->next < bound_of(row, column + depth); left->next++) {
            packed *at = to + column_of(*left->next) - column;
            *at = with_high_byte(*at, *left->next & 255);
        }
    }
}
