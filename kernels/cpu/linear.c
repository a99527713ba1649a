// Matrix products of a few rows with a large weight in the layout of checkpoints, one output per row of it: y[m][n] = x[m] . w[n] + bias[n].
//
// With one row of x, reading w takes all the time; from about twenty rows on, multiplying does. In between, both matter: while a part of w in the
// first-level cache is multiplied, the next part is fetched. It is fetched to the first-level cache if both parts fit there (Zen 5, 48 KiB: with a model
// of 20 MB, four rows of fp32 take 474 us, and 664 if the second-level cache is used), else to the second (Zen 4, 32 KiB: a step of four sequences over
// 0.9 GB of bf16 takes 75 to 82 ms of processor time, and 120 to 129 if the first is used).
//
// w may also be coded in 12 bits (lossless.h). It is then decoded a block of columns at a time, and summed in the same order, so the bits are the same.
#include "lossless.h"
#include "outputs.h"
#include "packing.h"
#include "program.h"

#define X_TILE (LANES == 16 ? 4 : 2)  // rows of x and of w in a tile, whose sums stay in registers
#define W_TILE 4
#define W_UNIT 16                                    // rows of w that are multiplied with x together
#define DEPTH (1024 / (long)sizeof(scalar))          // columns of a unit at a time: 1 KiB of each row, 20 % faster than 2 KiB at sixteen rows of x
#define LINE (64 / (long)sizeof(scalar))             // columns in a cache line of w
#define FETCHED_TO (LEVEL1_KIB >= 48 ? 3 : 2)        // where the next 16 KiB are fetched to: 3 is the first-level cache, 2 the second
#define X_BYTES (16 << 10)                           // most bytes of x for that: x is read for each row of w, and must stay in the first-level cache
#define BY_ROWS (LEVEL1_KIB < 48)                    // 1: a single tile of x is multiplied with rows of w, not with blocks of a unit; measured on Zen 4 only
#define DECODED_ROWS (IS_WIDENED ? W_TILE : W_UNIT)  // rows of a coded w that are decoded at a time: more would not stay in the first-level cache
#define X_ROWS 64                                    // rows of x that a unit is multiplied with before the next unit
#define PIECE_BYTES (64 << 10)                       // bytes of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (256 << 10)                // the same if x is read again for each piece, or if every thread takes many such pieces
#define PIECES_OF_THREAD 8                           // with so many, the work left when the first thread has finished is a sixteenth of its part
// Most rows of x that are multiplied with a row of w while it is read from memory. For fp32 in wide vectors it is one: with more rows, loading x takes
// longer than the products, and in a tile several rows of w share these loads (Zen 4, w in the second-level cache, three rows: 257 us, and 152 in tiles).
// On AVX2 x is widened already (Zen 3, two threads, 8,192 x 4,096 in bf16, six rows: 3.3 ms, and 3.9 in tiles).
#if LANES == 16 && LEVEL1_KIB < 48 && !defined(SCALAR_BF16)
#define FEW 1
#elif LANES == 8 && defined(SCALAR_BF16)
#define FEW 6
#else
#define FEW 3
#endif
#define FEW_CODED (PIECE == 32 && LEVEL1_KIB >= 48 ? 6 : LANES == 8 ? 3 : FEW)  // the same for a coded w, which is decoded into registers
#define MOST_FEW 6  // FEW and FEW_CODED are not larger
// Rows of w that are streamed at once, at most and by the rows of x. In vectors of eight lanes one row is limited by its sums, which wait for each other: a
// multiply-add takes four cycles. With one row of x, two threads of Zen 3 read 26 GB/s by single rows of w, 31 by pairs and 41 by fours.
// Zen 5 limited to AVX2, two threads, takes 21 ms for 0.9 GB of bf16 by single rows, 23 by pairs and 25 by fours; coded, 19 by single rows, 26 by fours.
#if LANES == 8
#define STREAMS 4
#define STREAMS_OF_ONE (LEVEL1_KIB >= 48 ? 1 : 4)
#define STREAMS_OF_PLAIN(x_rows) ((x_rows) == 1 ? STREAMS_OF_ONE : 2)
#define STREAMS_OF_CODED(x_rows) ((x_rows) == 1 ? STREAMS_OF_ONE : 2)
#else
#define STREAMS 1
#define STREAMS_OF_PLAIN(x_rows) 1
#define STREAMS_OF_CODED(x_rows) 1
#endif

// The up to four groups of rows of a unit. In gated products half of the groups are gates and half are ups.
typedef struct {
    long first[W_UNIT / W_TILE];  // the first row of each group in w
} unit;

// Loads columns of w, which is plain or `is_decoded`, from number `at` on.
INLINE piece load_columns(const int is_decoded, const void *w, long at) {
    return is_decoded ? load_packed((const packed *)w + at) : load_piece((const scalar *)w + at);
}

INLINE piece part_of_packed(const packed *p, long n) {
#if PER_LANE == 2
    return part_of_piece(p, n);
#else
    float padded[LANES] = {0};
    memcpy(padded, p, n * sizeof *p);
    return load_f32(padded);
#endif
}

INLINE piece part_of_columns(const int is_decoded, const void *w, long at, long n) {
    return is_decoded ? part_of_packed((const packed *)w + at, n) : part_of_piece((const scalar *)w + at, n);
}

// sums[m][n] += x[m] . w[n] over `depth` columns. Meanwhile it fetches `ahead`: lines of the next unit, whose rows are `ahead_stride` apart. A loop that
// is limited by memory is not `unrolled`: otherwise it runs ahead of its own fetches, and is 10 to 20 % slower on Zen 4.
INLINE void tile(const int unrolled, const int is_decoded, const int x_rows, const int w_rows, const int fetched, const packed *x, long x_stride,
                 const void *w, long w_stride, long depth, const scalar *ahead, long ahead_stride, float *sums) {
    lanes sum[X_TILE * W_TILE];
    for (int i = 0; i < x_rows * w_rows; i++) sum[i] = all(0);
    long k = 0;
#define COLUMNS \
    do { \
        piece columns[W_TILE]; \
        _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) columns[n] = load_columns(is_decoded, w, n * w_stride + k); \
        _Pragma("GCC unroll 4") for (int m = 0; m < x_rows; m++) { \
            const piece row = load_packed(x + m * x_stride + k); \
            _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) sum[m * w_rows + n] = multiply_add(sum[m * w_rows + n], columns[n], row); \
        } \
        k += PIECE; \
    } while (0)
#define LINE_OF_COLUMNS \
    do { \
        _Pragma("GCC unroll 4") for (int n = 0; n < fetched; n++) __builtin_prefetch(ahead + n * ahead_stride + k, 0, FETCHED_TO); \
        _Pragma("GCC unroll 4") for (int i = 0; i < LINE / PIECE; i++) COLUMNS; \
    } while (0)
    if (unrolled && LINE == PIECE)
#pragma GCC unroll 4
        for (; k + LINE <= depth;) LINE_OF_COLUMNS;
    else
        for (; k + LINE <= depth;) LINE_OF_COLUMNS;
    while (k + PIECE <= depth) COLUMNS;
#undef LINE_OF_COLUMNS
#undef COLUMNS
    if (k < depth)
        for (int m = 0; m < x_rows; m++) {
            piece row = part_of_packed(x + m * x_stride + k, depth - k);
            for (int n = 0; n < w_rows; n++)
                sum[m * w_rows + n] = multiply_add(sum[m * w_rows + n], part_of_columns(is_decoded, w, n * w_stride + k, depth - k), row);
        }
    float total[16];
    if (x_rows * w_rows == 16) {
        sums_of_16(sum, total);
    } else {
        for (int i = 0; i < x_rows * w_rows; i++) total[i] = sum_of(sum[i]);
    }
    for (int m = 0; m < x_rows; m++)
        for (int n = 0; n < w_rows; n++) sums[m * W_UNIT + n] += total[m * w_rows + n];
}

// `fetched`: how many of the next four rows of w this tile fetches.
INLINE void tiles(const int unrolled, const int is_decoded, long x_rows, long w_rows, const packed *x, long x_stride, const void *w, long w_stride,
                  long depth, const scalar *ahead, long ahead_stride, long fetched, float *sums) {
#define TILE(m, n, fetched) tile(unrolled, is_decoded, m, n, fetched, x, x_stride, w, w_stride, depth, ahead, ahead_stride, sums)
    if (w_rows == W_TILE) {
        if (x_rows == 1) TILE(1, W_TILE, W_TILE);
#if X_TILE == 4
        else if (x_rows == 2) TILE(2, W_TILE, W_TILE);
        else if (x_rows == 3) TILE(3, W_TILE, W_TILE);
#endif
        else if (fetched == W_TILE) TILE(X_TILE, W_TILE, W_TILE);
        else if (fetched == 2) TILE(X_TILE, W_TILE, 2);
        else TILE(X_TILE, W_TILE, 1);
        return;
    }
    for (long m = 0; m < x_rows; m++)
        for (long n = 0; n < w_rows; n++) {
            const void *row = is_decoded ? (const void *)((const packed *)w + n * w_stride) : (const scalar *)w + n * w_stride;
            tile(unrolled, is_decoded, 1, 1, 1, x + m * x_stride, x_stride, row, w_stride, depth, ahead, ahead_stride, sums + m * W_UNIT + n);
        }
}

// x in the layout of the products: blocks of DEPTH columns, each [rows][depth]. A single row has this layout already.
typedef struct {
    const packed *columns;
    long rows, stride;  // stride 0: x is in this layout
} operand;

INLINE const packed *block_of(const operand *x, long row, long column, long depth, long *stride) {
    *stride = x->stride ? x->stride : depth;
    return x->stride ? x->columns + row * x->stride + column : x->columns + x->rows * column + row * depth;
}

// A weight in its stored form: plain or coded.
typedef struct {
    const scalar *plain;
    coded coded;
    long columns;
} weight;

// total[n][m] += x[m] . w[n] over `depth` columns from k on; w points to column k of `w_rows` rows. Rows that are streamed several at once are fetched, as
// the hardware prefetchers see only short sequences (Zen 3, two threads: two rows of x 37 GB/s, and 29 without; with 896 columns 26 and 19).
INLINE void add_columns(const int is_decoded, const int x_rows, const int w_rows, const operand *x, const void *w, long w_stride, long k,
                        const long depth, float *total) {
    long stride;
    const packed *block = block_of(x, 0, k, depth, &stride);
    lanes sum[STREAMS * MOST_FEW];
    for (int i = 0; i < w_rows * x_rows; i++) sum[i] = all(0);
    long i = 0;
#define COLUMNS(at) \
    _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) { \
        const piece columns = load_columns(is_decoded, w, n * w_stride + at); \
        _Pragma("GCC unroll 6") for (int m = 0; m < x_rows; m++) \
            sum[n * x_rows + m] = multiply_add(sum[n * x_rows + m], columns, load_packed(block + m * stride + at)); \
    }
    for (; i + 16 * PIECE <= depth; i += 16 * PIECE) {
        if (!is_decoded && w_rows > 1)
#pragma GCC unroll 4
            for (int n = 0; n < w_rows; n++)
#pragma GCC unroll 4
                for (int j = 0; j < 16 * PIECE / LINE; j++)
                    __builtin_prefetch((const scalar *)w + (n + 2 * w_rows) * w_stride + i + j * LINE, 0, FETCHED_TO);
#pragma GCC unroll 16
        for (long j = 0; j < 16; j++) COLUMNS(i + j * PIECE)
    }
    for (; i + PIECE <= depth; i += PIECE) COLUMNS(i)
#undef COLUMNS
    if (i < depth)
        for (int n = 0; n < w_rows; n++)
            for (int m = 0; m < x_rows; m++)
                sum[n * x_rows + m] = multiply_add(sum[n * x_rows + m], part_of_columns(is_decoded, w, n * w_stride + i, depth - i),
                                                   part_of_packed(block + m * stride + i, depth - i));
    for (int i = 0; i < w_rows * x_rows; i++) total[i] += sum_of(sum[i]);
}

// sums[m][n] = x[m] . w[n], one or a few rows of w at once. One row is not fetched, because the hardware prefetchers work best alone. The number of loads in
// flight is limited by the instructions between them: without a loop inside a block a core reads 78 to 80 GB/s of at most 83, with one 73. With three rows
// of x it reads 56, and 44 in units; from four rows on units are as fast. Blocks of columns are summed as in tiles.
INLINE void stream_rows(const int x_rows, const int w_rows, const operand *x, const scalar *w, long first, long rows, long columns, float *sums) {
    w += first * columns;
    for (long n = 0; n < rows; n += w_rows, w += w_rows * columns) {
        float total[STREAMS * MOST_FEW] = {0};
        long k = 0;
        for (; k + DEPTH <= columns; k += DEPTH) add_columns(0, x_rows, w_rows, x, w + k, columns, k, DEPTH, total);
        if (k < columns) add_columns(0, x_rows, w_rows, x, w + k, columns, k, columns - k, total);
        for (int i = 0; i < w_rows * x_rows; i++) sums[i % x_rows * W_UNIT + n + i / x_rows] = total[i];
    }
}

// Distance in bytes from the codes in use to those that are fetched. Zen 5, one thread: 39.7 GB/s of at most 41, and 37 without fetching. Plain weights
// are faster without it, and so are codes on Zen 4 with one row of x (94 million weights, one thread: 5.0 ms, and 7.9 with fetching), but not with three
// rows (10.2 ms, and 7.8 with fetching).
#define AHEAD (LEVEL1_KIB >= 48 ? 4096 : 8192)
#define IS_FETCHED(x_rows) (LEVEL1_KIB >= 48 || (x_rows) > 1)

// As add_columns, for whole groups and halves of groups of coded rows, which are decoded in registers.
INLINE void add_groups(const int x_rows, const int w_rows, const operand *x, const uint8_t *codes, long w_stride, palette high, long k, const long depth,
                       float *total) {
    long stride;
    const packed *block = block_of(x, 0, k, depth, &stride);
    lanes sum[STREAMS * MOST_FEW];
    for (int i = 0; i < w_rows * x_rows; i++) sum[i] = all(0);
    long i = 0;
#define COLUMNS(half) \
    _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) { \
        joined columns[HALF_GROUP / JOINED]; \
        decode_half(half, codes + n * w_stride, high, columns); \
        const packed *rows = block + i + (half) * HALF_GROUP; \
        _Pragma("GCC unroll 16") for (int j = 0; j < HALF_GROUP / JOINED; j++) { \
            piece pieces[JOINED / PIECE]; \
            pieces_of(columns[j], pieces); \
            _Pragma("GCC unroll 2") for (int e = 0; e < JOINED / PIECE; e++, rows += PIECE) \
                _Pragma("GCC unroll 6") for (int m = 0; m < x_rows; m++) \
                    sum[n * x_rows + m] = multiply_add(sum[n * x_rows + m], pieces[e], load_packed(rows + m * stride)); \
        } \
    }
#pragma GCC unroll 4
    for (; i + GROUP <= depth; i += GROUP, codes += GROUP_BYTES) {
#pragma GCC unroll 4
        for (int n = 0; n < w_rows; n++)
#pragma GCC unroll 3
            for (int j = 0; j < GROUP_BYTES && IS_FETCHED(x_rows); j += 64) __builtin_prefetch(codes + n * w_stride + j + AHEAD, 0, FETCHED_TO);
        COLUMNS(0)
        COLUMNS(1)
    }
    if (i < depth) COLUMNS(0)
#undef COLUMNS
    for (int i = 0; i < w_rows * x_rows; i++) total[i] += sum_of(sum[i]);
}

// As stream_rows, for `rows` coded rows from `first` on. Rows that are streamed at once have the same palette.
INLINE void stream_coded(const int x_rows, const int w_rows, const operand *x, const coded *w, long first, long rows, long columns, float *sums) {
    packed decoded[STREAMS * DEPTH];
    escapes rest = escapes_at(w, first, 0), left[STREAMS];
    for (long row = first; row < first + rows; row += w_rows) {
        float total[STREAMS * MOST_FEW] = {0};
        const uint8_t *codes = codes_at(w, row, 0);
        const palette high = load_palette(palette_of(w, row));
        const uint32_t *begin = rest.next;
        if (row % PALETTE_ROWS == 0) rest.end = w->escapes + w->starts[row / PALETTE_ROWS + 1];
        for (int i = 0; i < w_rows; i++) {
            left[i] = rest;
            while (rest.next != rest.end && *rest.next < bound_of(row + i, MOST_COLUMNS)) rest.next++;
        }
        for (long k = 0; k < columns; k += DEPTH) {
            const long depth = columns - k < DEPTH ? columns - k : DEPTH;
            int is_regular = depth % HALF_GROUP == 0;
            for (int i = 0; begin != rest.next && i < w_rows; i++)
                is_regular &= left[i].next == left[i].end || *left[i].next >= bound_of(row + i, k + depth);
            if (is_regular && depth == DEPTH) {
                add_groups(x_rows, w_rows, x, codes + k * 3 / 2, w->row_bytes, high, k, DEPTH, total);
            } else if (is_regular) {
                add_groups(x_rows, w_rows, x, codes + k * 3 / 2, w->row_bytes, high, k, depth, total);
            } else {
                decode_rows(w, row, w_rows, k, depth, left, decoded, DEPTH);
                add_columns(1, x_rows, w_rows, x, decoded, DEPTH, k, depth, total);
            }
        }
        for (int i = 0; i < w_rows * x_rows; i++) sums[i % x_rows * W_UNIT + row - first + i / x_rows] = total[i];
    }
}

static __attribute__((noinline)) void multiply_few(const operand *x, const weight *w, long first, long rows, float *sums) {
    const long columns = w->columns;
    const int has_pairs = rows % STREAMS == 0 && first % STREAMS == 0;
    switch (w->coded.codes ? -x->rows : x->rows) {
#define STREAM(stream, x_rows, w_rows, of) \
    do { \
        if (has_pairs) stream(x_rows, w_rows, x, of, first, rows, columns, sums); \
        else stream(x_rows, 1, x, of, first, rows, columns, sums); \
    } while (0)
        case 1: STREAM(stream_rows, 1, STREAMS_OF_PLAIN(1), w->plain); break;
        case -1: STREAM(stream_coded, 1, STREAMS_OF_CODED(1), &w->coded); break;
#if FEW > 1
        case 2: STREAM(stream_rows, 2, STREAMS_OF_PLAIN(2), w->plain); break;
        case 3: STREAM(stream_rows, 3, STREAMS_OF_PLAIN(3), w->plain); break;
        case -2: STREAM(stream_coded, 2, STREAMS_OF_CODED(2), &w->coded); break;
        case -3: STREAM(stream_coded, 3, STREAMS_OF_CODED(3), &w->coded); break;
#endif
#if FEW > 3
        case 4: STREAM(stream_rows, 4, STREAMS_OF_PLAIN(4), w->plain); break;
        case 5: STREAM(stream_rows, 5, STREAMS_OF_PLAIN(5), w->plain); break;
        case 6: STREAM(stream_rows, 6, STREAMS_OF_PLAIN(6), w->plain); break;
#endif
#if FEW_CODED > 3
        case -4: STREAM(stream_coded, 4, STREAMS_OF_CODED(4), &w->coded); break;
        case -5: STREAM(stream_coded, 5, STREAMS_OF_CODED(5), &w->coded); break;
        case -6: STREAM(stream_coded, 6, STREAMS_OF_CODED(6), &w->coded); break;
#endif
#undef STREAM
    }
}

// Returns the stored bytes of a row from `column` on.
INLINE const scalar *kept_at(const weight *w, long row, long column) {
    return w->coded.codes ? (const scalar *)codes_at(&w->coded, row, column) : w->plain + row * w->columns + column;
}

// Multiplies one unit with rows of x that are a single tile. It takes four rows of w from start to end, while it fetches the next four. Compared with one
// block of columns of the whole unit after another, on Zen 4, one thread, 157 million weights: in bf16 12.6 ms instead of 15.4 at four rows; in fp32 23.7
// instead of 30.7 at four, and 22.3 instead of 32.1 at two.
INLINE void multiply_one_tile(const int is_coded, const operand *x, long top, long x_rows, const weight *w, const unit *current, const unit *next,
                              const long *w_rows, float *sums) {
    const long columns = w->columns, kept_stride = is_coded ? w->coded.row_bytes / (long)sizeof(scalar) : columns;
    packed decoded[W_TILE * DEPTH] __attribute__((aligned(64)));
    for (long group = 0; group < W_UNIT / W_TILE; group++) {
        if (!w_rows[group]) continue;
        const long first = current->first[group], is_last = group + 1 == W_UNIT / W_TILE || !w_rows[group + 1];
        const long behind = is_last ? next->first[0] : current->first[group + 1];
        escapes left[W_TILE];
        for (long n = 0; is_coded && n < w_rows[group]; n++) left[n] = escapes_at(&w->coded, first + n, 0);
        for (long k = 0; k < columns; k += DEPTH) {
            const long depth = columns - k < DEPTH ? columns - k : DEPTH;
            long stride;
            const packed *block = block_of(x, top, k, depth, &stride);
            const scalar *ahead = kept_at(w, behind, k);
            if (is_coded) {
                decode_rows(&w->coded, first, w_rows[group], k, depth, left, decoded, DEPTH);
                tiles(0, 1, x_rows, w_rows[group], block, stride, decoded, DEPTH, depth, ahead, kept_stride, W_TILE, sums + group * W_TILE);
            } else {
                tiles(0, 0, x_rows, w_rows[group], block, stride, kept_at(w, first, k), columns, depth, ahead, columns, W_TILE, sums + group * W_TILE);
            }
        }
    }
}

// Both forms are separate functions: compiled into one they would have too few registers (plain, 15 % slower).
static __attribute__((noinline)) void multiply_plain_tile(const operand *x, long top, long x_rows, const weight *w, const unit *current, const unit *next,
                                                          const long *w_rows, float *sums) {
    multiply_one_tile(0, x, top, x_rows, w, current, next, w_rows, sums);
}

static __attribute__((noinline)) void multiply_coded_tile(const operand *x, long top, long x_rows, const weight *w, const unit *current, const unit *next,
                                                          const long *w_rows, float *sums) {
    multiply_one_tile(1, x, top, x_rows, w, current, next, w_rows, sums);
}

// sums [x_rows][W_UNIT]: multiplies one unit with rows top .. top + x_rows of x. `next` is the unit that this thread takes next.
static void multiply(const operand *x, long top, long x_rows, const weight *w, const unit *current, const unit *next, const long *w_rows, float *sums) {
    const long num_tiles = (x_rows + X_TILE - 1) / X_TILE, columns = w->columns;
    // If there are several tiles of x, they share the fetching of four rows of w. With two of eight rows fetching one row each, half of the fetches came
    // too late (fp32, 9,728 x 896, one thread: 3,060 us instead of 2,710).
    const long fetched = num_tiles == 1 ? W_TILE : num_tiles < W_TILE ? 2 : 1;
    const int is_coded = w->coded.codes != NULL;
    memset(sums, 0, x_rows * W_UNIT * sizeof *sums);
    if (BY_ROWS && num_tiles == 1 && columns > DEPTH) {  // in shorter rows the next four rows are needed too soon to be fetched in time
        if (is_coded) multiply_coded_tile(x, top, x_rows, w, current, next, w_rows, sums);
        else multiply_plain_tile(x, top, x_rows, w, current, next, w_rows, sums);
        return;
    }
    const long kept_stride = is_coded ? w->coded.row_bytes / (long)sizeof(scalar) : columns;
    packed decoded[DECODED_ROWS * DEPTH] __attribute__((aligned(64)));
    escapes left[W_UNIT];
    for (long n = 0; is_coded && n < W_UNIT; n++)
        if (n % W_TILE < w_rows[n / W_TILE]) left[n] = escapes_at(&w->coded, current->first[n / W_TILE] + n % W_TILE, 0);
    const long groups = is_coded ? DECODED_ROWS / W_TILE : W_UNIT / W_TILE;
    for (long k = 0; k < columns; k += DEPTH)
        for (long begin = 0; begin < W_UNIT / W_TILE; begin += groups) {
            const long depth = columns - k < DEPTH ? columns - k : DEPTH;
            const int is_last = k + depth == columns;
            for (long group = begin; is_coded && group < begin + groups; group++)
                if (w_rows[group])
                    decode_rows(&w->coded, current->first[group], w_rows[group], k, depth, left + group * W_TILE,
                                decoded + (group - begin) * W_TILE * DEPTH, DEPTH);
            for (long i = 0; i < num_tiles; i++) {
                const long m = i * X_TILE, rows = x_rows - m < X_TILE ? x_rows - m : X_TILE;
                long stride;
                const packed *block = block_of(x, top + m, k, depth, &stride);
                for (long group = begin; group < begin + groups; group++) {
                    if (!w_rows[group]) continue;
                    const scalar *ahead = is_last ? kept_at(w, next->first[group], 0) : kept_at(w, current->first[group], k + depth);
                    ahead += i * fetched % W_TILE * kept_stride;
                    float *into = sums + m * W_UNIT + group * W_TILE;
#define TILES(unrolled, is_decoded, rows_of_w, stride_of_w) \
    tiles(unrolled, is_decoded, rows, w_rows[group], block, stride, rows_of_w, stride_of_w, depth, ahead, kept_stride, fetched, into)
                    const packed *of_codes = decoded + (group - begin) * W_TILE * DEPTH;
                    const int unrolled = !BY_ROWS || rows == X_TILE || columns <= DEPTH;
                    if (is_coded && unrolled) TILES(1, 1, of_codes, DEPTH);
                    else if (is_coded) TILES(0, 1, of_codes, DEPTH);
                    else if (unrolled) TILES(1, 0, kept_at(w, current->first[group], k), columns);
                    else TILES(0, 0, kept_at(w, current->first[group], k), columns);
#undef TILES
                }
            }
        }
}

typedef struct {
    operand x;
    weight w;
    const scalar *bias;
    char *y;
    long outputs, outputs_per_unit, units, units_per_piece;
    int activation, wide_output;
} arguments;

// Returns the groups of rows of a unit, and the number of rows in each.
INLINE unit unit_at(const arguments *a, long index, long *group_rows) {
    const long begin = index * a->outputs_per_unit, count = a->outputs - begin;
    unit u;
    for (long group = 0; group < W_UNIT / W_TILE; group++) {
        const long part = a->activation ? group % (W_UNIT / W_TILE / 2) : group, half = a->activation ? group / (W_UNIT / W_TILE / 2) : 0;
        const long left = count - part * W_TILE;
        group_rows[group] = left < 0 ? 0 : left < W_TILE ? left : W_TILE;
        u.first[group] = half * a->outputs + begin + part * W_TILE;
    }
    return u;
}

static void multiply_units(const void *given, long piece) {
    const arguments *a = given;
    float sums[X_ROWS * W_UNIT + LANES];  // after a unit's last row some lanes are read but not used
    const long first = piece * a->units_per_piece;
    const long end = first + a->units_per_piece < a->units ? first + a->units_per_piece : a->units;
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    for (long top = 0; top < a->x.rows; top += X_ROWS) {
        const long x_rows = a->x.rows - top < X_ROWS ? a->x.rows - top : X_ROWS;
        for (long u = first; u < end; u++) {
            long group_rows[W_UNIT / W_TILE], unused[W_UNIT / W_TILE];
            const unit current = unit_at(a, u, group_rows);
            const unit next = unit_at(a, u + 1 < a->units ? u + 1 : u, unused);  // even of the next piece, which is probably this thread's
            multiply(&a->x, top, x_rows, &a->w, &current, &next, group_rows, sums);
            const long begin = u * a->outputs_per_unit;
            const long count = a->outputs - begin < a->outputs_per_unit ? a->outputs - begin : a->outputs_per_unit;
            for (long m = 0; m < x_rows; m++)
                finish(sums + m * W_UNIT, W_UNIT / 2, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                       a->y + ((top + m) * a->outputs + begin) * size);
        }
    }
}

// As multiply_units, for few rows of x.
static void stream_units(const void *given, long piece) {
    const arguments *a = given;
    float sums[MOST_FEW * W_UNIT + LANES];
    const long end = a->outputs_per_unit * a->units_per_piece * (piece + 1);
    const size_t size = a->wide_output ? sizeof(float) : sizeof(scalar);
    for (long begin = a->outputs_per_unit * a->units_per_piece * piece; begin < end && begin < a->outputs; begin += a->outputs_per_unit) {
        const long count = a->outputs - begin < a->outputs_per_unit ? a->outputs - begin : a->outputs_per_unit;
        multiply_few(&a->x, &a->w, begin, count, sums);
        if (a->activation) multiply_few(&a->x, &a->w, a->outputs + begin, count, sums + W_UNIT / 2);
        for (long m = 0; m < a->x.rows; m++)
            finish(sums + m * W_UNIT, W_UNIT / 2, a->bias ? a->bias + begin : NULL, a->outputs, count, a->activation, a->wide_output,
                   a->y + (m * a->outputs + begin) * size);
    }
}

typedef struct {
    const scalar *x;
    packed *packed;
    long rows, columns, stride;
} packing;

// Packs x. Long rows a multiple of 4 KiB apart would compete for the cache with each other, and packing takes little time beside multiplying.
static void pack_block(const void *given, long piece) {
    const packing *p = given;
    const long k = piece * DEPTH, depth = p->columns - k < DEPTH ? p->columns - k : DEPTH;
    for (long m = 0; m < p->rows; m++) copy_packed(p->x + m * p->stride + k, depth, depth, p->packed + k * p->rows + m * depth);
}

// Returns 1 if there is no memory.
static int multiply_by(const scalar *x, weight w, const scalar *bias, void *y, long rows, long outputs, long x_stride, int activation, int wide_output,
                       int threads) {
    const long columns = w.columns, row_bytes = w.coded.codes ? w.coded.row_bytes : columns * (long)sizeof(scalar);
    const long per_unit = activation ? W_UNIT / 2 : W_UNIT, units = (outputs + per_unit - 1) / per_unit;
    const long unit_bytes = W_UNIT * row_bytes, even = units * unit_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = rows > X_ROWS || even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long per_piece = 1 + piece_bytes / (unit_bytes + 1);
    operand columns_of_x = {(const packed *)x, rows, x_stride};
    if (IS_WIDENED || (rows > 1 && columns > DEPTH)) {
        packed *packed_x = shared_scratch(rows * columns * sizeof *packed_x);
        if (!packed_x) return 1;
        const packing p = {x, packed_x, rows, columns, x_stride};
        share(pack_block, &p, (columns + DEPTH - 1) / DEPTH, 1);
        columns_of_x = (operand){packed_x, rows, 0};
    }
    const arguments a = {columns_of_x, w, bias, y, outputs, per_unit, units, per_piece, activation, wide_output};
    const long pieces = (units + per_piece - 1) / per_piece;
    const char *gates = (const char *)kept_at(&w, 0, 0), *ups = activation ? gates + outputs * row_bytes : NULL;
    const reading reads = {.begin = gates, .second = ups, .bytes_of_piece = per_piece * per_unit * row_bytes};
    const int few = w.coded.codes && FEW_CODED < FEW ? FEW_CODED : FEW;
    const int streams = rows <= few || (w.coded.codes && rows <= FEW_CODED && rows * columns * (long)sizeof *x <= X_BYTES);
    share_reading(streams ? stream_units : multiply_units, &a, sizeof a, reads, pieces, threads);
    return 0;
}

// activation 0: y [rows][outputs] = x w^T + bias. activation 1 (silu) or 2 (gelu, tanh form): w has 2 * outputs rows, gates then ups, and y = act(gate) *
// up. wide_output: y is fp32 for every scalar type. Returns 1 if there is no memory.
int NAME(linear)(const scalar *x, const scalar *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation,
                 int wide_output, int threads) {
    return multiply_by(x, (weight){w, {0}, columns}, bias, y, rows, outputs, x_stride, activation, wide_output, threads);
}

// The same with a weight in 12 bits.
int NAME(lossless_linear)(const scalar *x, const uint8_t *codes, const uint8_t *palettes, const int32_t *starts, const uint32_t *escapes,
                          const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation, int wide_output,
                          int threads) {
    const coded coded = {codes, palettes, starts, escapes, coded_row_bytes(columns)};
    return multiply_by(x, (weight){NULL, coded, columns}, bias, y, rows, outputs, x_stride, activation, wide_output, threads);
}
