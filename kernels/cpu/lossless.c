// Conversion of plain weights to the 12 bits of lossless.h, and back, whole or by rows. Products with them are in linear.c and gemm.c.
#include "lossless.h"

typedef struct {
    coded w;
    const int64_t *numbers;  // numbers of the rows; NULL: all rows, in order
    scalar *y;
    long rows, columns, table_rows, rows_per_piece;
    float scale;
} unpacking;

// Returns a decoded number as a scalar, with the same bits; `put` would replace NaN.
INLINE scalar exact(packed value) {
#if PER_LANE == 1 && defined(SCALAR_BF16)
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (scalar)(bits >> 16);
#else
    return value;
#endif
}

static void unpack_rows(const void *given, long piece) {
    const unpacking *a = given;
    const long begin = piece * a->rows_per_piece, end = begin + a->rows_per_piece;
    packed decoded[MOST_DECODED];
    for (long i = begin; i < end && i < a->rows; i++) {
        const int64_t number = a->numbers ? a->numbers[i] : i;
        const int is_there = number >= 0 && number < a->table_rows;
        // a number outside the table gives a row of NaN, as in rows.c
        const float factor = is_there ? a->scale : NAN;
        scalar *to = a->y + i * a->columns;
        escapes left = escapes_at(&a->w, is_there ? number : 0, 0);
        for (long k = 0; k < a->columns; k += MOST_DECODED) {
            const long depth = a->columns - k < MOST_DECODED ? a->columns - k : MOST_DECODED;
            decode_rows(&a->w, is_there ? number : 0, 1, k, depth, &left, decoded, MOST_DECODED);
            if (factor == 1.0f)
                for (long j = 0; j < depth; j++) to[k + j] = exact(decoded[j]);
            else
                for (long j = 0; j < depth; j++) to[k + j] = put(get(exact(decoded[j])) * factor);
        }
    }
}

// Writes the rows `numbers` of a weight [table_rows][columns], times `scale`, or all rows if numbers is NULL.
void NAME(lossless_rows)(const uint8_t *codes, const uint8_t *palettes, const int32_t *starts, const uint32_t *escapes, const int64_t *numbers, scalar *y,
                         long rows, long columns, long table_rows, float scale, int threads) {
    const coded w = {codes, palettes, starts, escapes, coded_row_bytes(columns)};
    const unpacking a = {w, numbers, y, rows, columns, table_rows, 1 + (1 << 13) / (columns + 1), scale};
    share(unpack_rows, &a, (rows + a.rows_per_piece - 1) / a.rows_per_piece, threads);
}

#ifdef SCALAR_BF16  // compiled only once: plain weights are always bf16
typedef struct {
    const bf16 *w;
    uint8_t *palettes, *codes;
    int32_t *starts;
    uint32_t *escapes;
    long rows, columns, row_bytes;
} packing_12;

#define HIGH_BYTES 256

// The first entry of a palette stands in for escapes until they get their own high byte. It must not be an infinity or NaN, because a GPU adds x times the
// difference of the two values.
INLINE int is_small(long high) { return (high & 0x7F) != 0x7F; }

static void survey(const void *given, long group) {
    const packing_12 *a = given;
    const long begin = group * PALETTE_ROWS, end = begin + PALETTE_ROWS < a->rows ? begin + PALETTE_ROWS : a->rows;
    long counts[4][HIGH_BYTES] = {{0}}, totals[HIGH_BYTES];  // four counters per byte: increments of one counter wait for each other
    const bf16 *w = a->w + begin * a->columns;
    for (long i = 0; i < (end - begin) * a->columns; i++) counts[i & 3][w[i] >> 8]++;
    for (long byte = 0; byte < HIGH_BYTES; byte++) totals[byte] = counts[0][byte] + counts[1][byte] + counts[2][byte] + counts[3][byte];
    long escapes = (end - begin) * a->columns;
    for (long place = 0; place < PALETTE; place++) {  // the most frequent remaining byte, and of equally frequent ones the lowest
        long most = 0;
        for (long byte = 1; byte < HIGH_BYTES; byte++)
            if (totals[byte] > totals[most] && (place || is_small(byte))) most = byte;
        a->palettes[group * PALETTE + place] = (uint8_t)most;
        escapes -= totals[most];
        totals[most] = -1;
    }
    a->starts[group + 1] = (int32_t)escapes;
}

// Writes the palettes, and after starts[0] the number of escapes of each palette's rows.
void lossless_survey(const bf16 *w, uint8_t *palettes, int32_t *starts, long rows, long columns, int threads) {
    const packing_12 a = {w, palettes, NULL, starts, NULL, rows, columns, 0};
    starts[0] = 0;
    share(survey, &a, (rows + PALETTE_ROWS - 1) / PALETTE_ROWS, threads);
}

#define NO_PLACE 255

// Copies bytes from the order of columns to that of `column_at`.
INLINE void arrange(const uint8_t *from, uint8_t *to) {
    for (long place = 0; place < GROUP; place += 8) memcpy(to + place, from + column_at(place), 8);
}

static void encode(const void *given, long group) {
    const packing_12 *a = given;
    const uint8_t *high_bytes = a->palettes + group * PALETTE;
    const long begin = group * PALETTE_ROWS, end = begin + PALETTE_ROWS < a->rows ? begin + PALETTE_ROWS : a->rows;
    uint32_t *escape = a->escapes + a->starts[group];
    for (long row = begin; row < end; row++) {
        uint8_t *to = a->codes + row * a->row_bytes;
        for (long column = 0; column < a->columns; column += GROUP, to += GROUP_BYTES) {
            const long count = a->columns - column < GROUP ? a->columns - column : GROUP;
            bf16 values[GROUP] = {0};
            uint8_t low[GROUP], high[GROUP], places[GROUP], arranged[GROUP];
            memcpy(values, a->w + row * a->columns + column, count * sizeof *values);
            for (long k = 0; k < GROUP; k++) low[k] = (uint8_t)values[k], high[k] = (uint8_t)(values[k] >> 8);
            memset(places, NO_PLACE, sizeof places);
            for (long place = PALETTE - 1; place >= 0; place--)
                for (long k = 0; k < GROUP; k++) places[k] = high[k] == high_bytes[place] ? (uint8_t)place : places[k];
            memset(places + count, 0, GROUP - count);
            uint8_t any = 0;
            for (long k = 0; k < GROUP; k++) any |= places[k];
            for (long k = 0; any > PALETTE - 1 && k < count; k++)
                if (places[k] == NO_PLACE) {
                    places[k] = 0;
                    *escape++ = (uint32_t)(row - begin) << 29 | (uint32_t)(column + k) << 8 | high[k];
                }
            arrange(places, arranged);
            for (long i = 0; i < GROUP / 2; i++) to[i] = (uint8_t)(arranged[i] | arranged[i + GROUP / 2] << 4);
            uint8_t rest[GROUP];
            arrange(low, rest);
            memcpy(to + GROUP / 2, rest, count > HALF_GROUP ? GROUP : HALF_GROUP);
        }
    }
}

// Encodes rows of a plain weight with its surveyed palettes and starts; `escapes` has room for all escapes.
void lossless_encode(const bf16 *w, uint8_t *palettes, int32_t *starts, uint8_t *codes, uint32_t *escapes, long rows, long columns, int threads) {
    const packing_12 a = {w, palettes, codes, starts, escapes, rows, columns, coded_row_bytes(columns)};
    share(encode, &a, (rows + PALETTE_ROWS - 1) / PALETTE_ROWS, threads);
}

// Joins planes to values [n]. planes: n exponents, then n bytes with a sign and a mantissa.
void join_planes(const uint8_t *planes, bf16 *values, long n) {
    const uint8_t *others = planes + n;
    for (long i = 0; i < n; i++) values[i] = (bf16)((others[i] & 0x80) << 8 | planes[i] << 7 | (others[i] & 0x7F));
}
#endif
