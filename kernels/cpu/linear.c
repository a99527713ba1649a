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
#include "program.h"

#define X_TILE (LANES == 16 ? 4 : 2)  // rows of x and of w in a tile, whose sums stay in registers
#define W_TILE 4
#define W_UNIT 16                                    // rows of w that are multiplied with x together
#define DEPTH (1024 / (long)sizeof(scalar))          // columns of a unit at a time: 1 KiB of each row, 20 % faster than 2 KiB at sixteen rows of x
#define FETCHED_TO (LEVEL1_KIB >= 48 ? 3 : 2)        // where the next 16 KiB are fetched to: 3 is the first-level cache, 2 the second
#define FEW_CODED (PIECE == 32 && LEVEL1_KIB >= 48 ? 6 : FEW)  // most rows of x that a coded w is multiplied with while it is decoded into registers
#define X_BYTES (16 << 10)                           // most bytes of x for that: x is read for each row of w, and must stay in the first-level cache
#define BY_ROWS (LEVEL1_KIB < 48)                    // 1: a single tile of x is multiplied with rows of w, not with blocks of a unit; measured on Zen 4 only
#define X_ROWS 64                                    // rows of x that a unit is multiplied with before the next unit
#define PIECE_BYTES (64 << 10)                       // bytes of w that a thread takes at a time, at least
#define LARGE_PIECE_BYTES (256 << 10)                // the same if x is read again for each piece, or if every thread takes many such pieces
#define PIECES_OF_THREAD 8                           // with so many, the work left when the first thread has finished is a sixteenth of its part
// Most rows of x that are multiplied with a row of w while it is read from memory. For fp32 in wide vectors it is one: with more rows, loading x takes
// longer than the products, and in a tile several rows of w share these loads (Zen 4, w in the second-level cache, three rows: 257 us, and 152 in tiles).
#if LANES == 16 && LEVEL1_KIB < 48 && !defined(SCALAR_BF16)
#define FEW 1
#else
#define FEW 3
#endif

// The up to four groups of rows of a unit. In gated products half of the groups are gates and half are ups.
typedef struct {
    long first[W_UNIT / W_TILE];  // the first row of each group in w
} unit;

// sums[m][n] += x[m] . w[n] over `depth` columns. Meanwhile it fetches `ahead`: lines of the next unit, whose rows are `ahead_stride` apart. A loop that
// is limited by memory is not `unrolled`: otherwise it runs ahead of its own fetches, and is 10 to 20 % slower on Zen 4.
INLINE void tile(const int unrolled, const int x_rows, const int w_rows, const int fetched, const scalar *x, long x_stride, const scalar *w,
                 long w_stride, long depth, const scalar *ahead, long ahead_stride, float *sums) {
    lanes sum[X_TILE * W_TILE];
    for (int i = 0; i < x_rows * w_rows; i++) sum[i] = all(0);
    long k = 0;
#define STEP \
    do { \
        piece columns[W_TILE]; \
        _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) columns[n] = load_piece(w + n * w_stride + k); \
        _Pragma("GCC unroll 4") for (int n = 0; n < fetched; n++) __builtin_prefetch(ahead + n * ahead_stride + k, 0, FETCHED_TO); \
        _Pragma("GCC unroll 4") for (int m = 0; m < x_rows; m++) { \
            const piece row = load_piece(x + m * x_stride + k); \
            _Pragma("GCC unroll 4") for (int n = 0; n < w_rows; n++) sum[m * w_rows + n] = multiply_add(sum[m * w_rows + n], columns[n], row); \
        } \
    } while (0)
    if (unrolled)
#pragma GCC unroll 4
        for (; k + PIECE <= depth; k += PIECE) STEP;
    else
        for (; k + PIECE <= depth; k += PIECE) STEP;
#undef STEP
    if (k < depth)
        for (int m = 0; m < x_rows; m++) {
            piece row = part_of_piece(x + m * x_stride + k, depth - k);
            for (int n = 0; n < w_rows; n++)
                sum[m * w_rows + n] = multiply_add(sum[m * w_rows + n], part_of_piece(w + n * w_stride + k, depth - k), row);
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
INLINE void tiles(const int unrolled, long x_rows, long w_rows, const scalar *x, long x_stride, const scalar *w, long w_stride, long depth,
                  const scalar *ahead, long ahead_stride, long fetched, float *sums) {
#define TILE(m, n, fetched) tile(unrolled, m, n, fetched, x, x_stride, w, w_stride, depth, ahead, ahead_stride, sums)
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
        for (long n = 0; n < w_rows; n++)
            tile(unrolled, 1, 1, 1, x + m * x_stride, x_stride, w + n * w_stride, w_stride, depth, ahead, ahead_stride, sums + m * W_UNIT + n);
}

// x in the layout of the products: blocks of DEPTH columns, each [rows][depth]. A single row has this layout already.
typedef struct {
    const scalar *columns;
    long rows, stride;  // stride 0: x is packed
} operand;

INLINE const scalar *block_of(const operand *x, long row, long column, long depth, long *stride) {
    *stride = x->stride ? x->stride : depth;
    return x->stride ? x->columns + row * x->stride + column : x->columns + x->rows * column + row * depth;
}

// A weight in its stored form: plain or coded.
typedef struct {
    const scalar *plain;
    coded coded;
    long columns;
} weight;

// total[m] += x[m] . w over the block of columns that starts at k; w points to column k.
INLINE void add_block(const int x_rows, const operand *x, const scalar *w, long k, float *total) {
    long stride;
    const scalar *block = block_of(x, 0, k, DEPTH, &stride);
    lanes sum[FEW_CODED];
    for (int m = 0; m < x_rows; m++) sum[m] = all(0);
#pragma GCC unroll 16
    for (long i = 0; i < DEPTH; i += PIECE) {
        const piece column = load_piece(w + i);
#pragma GCC unroll 6
        for (int m = 0; m < x_rows; m++) sum[m] = multiply_add(sum[m], column, load_piece(block + m * stride + i));
    }
    for (int m = 0; m < x_rows; m++) total[m] += sum_of(sum[m]);
}

// The same for the columns after the last whole block.
INLINE void add_rest(const int x_rows, const operand *x, const scalar *w, long k, long depth, float *total) {
    long stride;
    const scalar *block = block_of(x, 0, k, depth, &stride);
    for (int m = 0; m < x_rows; m++) {
        lanes sum = all(0);
        long i = 0;
        for (; i + PIECE <= depth; i += PIECE) sum = multiply_add(sum, load_piece(w + i), load_piece(block + m * stride + i));
        if (i < depth) sum = multiply_add(sum, part_of_piece(w + i, depth - i), part_of_piece(block + m * stride + i, depth - i));
        total[m] += sum_of(sum);
    }
}

// sums[m][n] = x[m] . w[n], row by row of w. Nothing is fetched, because the hardware prefetchers work best alone. The number of loads in flight is
// limited by the instructions between them: without a loop inside a block a core reads 78 to 80 GB/s of at most 83, with one 73. With three rows of x it
// reads 56, and 44 in units; from four rows on units are as fast. Blocks of columns are summed as in tiles.
INLINE void stream_rows(const int x_rows, const operand *x, const scalar *w, long rows, long columns, float *sums) {
    for (long n = 0; n < rows; n++, w += columns) {
        float total[FEW] = {0};
        long k = 0;
        for (; k + DEPTH <= columns; k += DEPTH) add_block(x_rows, x, w + k, k, total);
        if (k < columns) add_rest(x_rows, x, w + k, k, columns - k, total);
        for (int m = 0; m < x_rows; m++) sums[m * W_UNIT + n] = total[m];
    }
}

#if PIECE == 32
// Distance in bytes from the codes in use to those that are fetched. Zen 5, one thread: 39.7 GB/s of at most 41, and 37 without fetching. Plain weights
// are faster without it, and so are codes on Zen 4 with one row of x (94 million weights, one thread: 5.0 ms, and 7.9 with fetching), but not with three
// rows (10.2 ms, and 7.8 with fetching).
#define AHEAD (LEVEL1_KIB >= 48 ? 4096 : 8192)
#define IS_FETCHED(x_rows) (LEVEL1_KIB >= 48 || (x_rows) > 1)

// As add_block and add_rest, for whole groups and halves of groups, which are decoded in registers.
INLINE void add_groups(const int x_rows, const operand *x, const uint8_t *codes, palette high, long k, const long depth, float *total) {
    long stride;
    const scalar *block = block_of(x, 0, k, depth, &stride);
    lanes sum[FEW_CODED];
    for (int m = 0; m < x_rows; m++) sum[m] = all(0);
    long i = 0;
#define COLUMNS(halves) \
    do { \
        piece columns[4]; \
        decode_group(halves, codes, high, columns); \
        _Pragma("GCC unroll 4") for (int j = 0; j < 2 * (halves); j++) \
            _Pragma("GCC unroll 6") for (int m = 0; m < x_rows; m++) \
                sum[m] = multiply_add(sum[m], columns[j], load_piece(block + m * stride + i + 32 * j)); \
    } while (0)
#pragma GCC unroll 4
    for (; i + GROUP <= depth; i += GROUP, codes += GROUP_BYTES) {
#pragma GCC unroll 3
        for (int j = 0; j < GROUP_BYTES && IS_FETCHED(x_rows); j += 64) __builtin_prefetch(codes + j + AHEAD, 0, FETCHED_TO);
        COLUMNS(2);
    }
    if (i < depth) COLUMNS(1);
#undef COLUMNS
    for (int m = 0; m < x_rows; m++) total[m] += sum_of(sum[m]);
}
#endif

// As stream_rows, for `rows` coded rows from `first` on.
INLINE void stream_coded(const int x_rows, const operand *x, const coded *w, long first, long rows, long columns, float *sums) {
    scalar decoded[DEPTH];
    escapes left = escapes_at(w, first, 0);
    for (long n = 0; n < rows; n++) {
        float total[FEW_CODED] = {0};
#if PIECE == 32
        const uint8_t *codes = codes_at(w, first + n, 0);
        const palette high = load_palette(palette_of(w, first + n));
#endif
        if ((first + n) % PALETTE_ROWS == 0) left.end = w->escapes + w->starts[(first + n) / PALETTE_ROWS + 1];
        for (long k = 0; k < columns; k += DEPTH) {
            const long depth = columns - k < DEPTH ? columns - k : DEPTH;
#if PIECE == 32
            if (depth % HALF_GROUP == 0 && (left.next == left.end || *left.next >= bound_of(first + n, k + depth))) {
                if (depth == DEPTH) add_groups(x_rows, x, codes + k * 3 / 2, high, k, DEPTH, total);
                else add_groups(x_rows, x, codes + k * 3 / 2, high, k, depth, total);
                continue;
            }
#endif
            decode_rows(w, first + n, 1, k, depth, &left, decoded, DEPTH);
            if (depth == DEPTH) add_block(x_rows, x, decoded, k, total);
            else add_rest(x_rows, x, decoded, k, depth, total);
        }
        for (int m = 0; m < x_rows; m++) sums[m * W_UNIT + n] = total[m];
    }
}

static __attribute__((noinline)) void multiply_few(const operand *x, const weight *w, long first, long rows, float *sums) {
    const long columns = w->columns;
    if (w->coded.codes) {
        switch (x->rows) {
#define CASE(count) \
    case count: stream_coded(count, x, &w->coded, first, rows, columns, sums); break;
            CASE(1)
#if FEW > 1
            CASE(2) CASE(3)
#endif
#if FEW_CODED > 3
            CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
        }
        return;
    }
    switch (x->rows) {
#define CASE(count) \
    case count: stream_rows(count, x, w->plain + first * columns, rows, columns, sums); break;
        CASE(1)
#if FEW > 1
        CASE(2) CASE(3)
#endif
#undef CASE
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
    scalar decoded[W_TILE * DEPTH] __attribute__((aligned(64)));
    for (long group = 0; group < W_UNIT / W_TILE; group++) {
        if (!w_rows[group]) continue;
        const long first = current->first[group], is_last = group + 1 == W_UNIT / W_TILE || !w_rows[group + 1];
        const long behind = is_last ? next->first[0] : current->first[group + 1];
        escapes left[W_TILE];
        for (long n = 0; is_coded && n < w_rows[group]; n++) left[n] = escapes_at(&w->coded, first + n, 0);
        for (long k = 0; k < columns; k += DEPTH) {
            const long depth = columns - k < DEPTH ? columns - k : DEPTH;
            long stride;
            const scalar *block = block_of(x, top, k, depth, &stride), *ahead = kept_at(w, behind, k);
            if (is_coded) {
                decode_rows(&w->coded, first, w_rows[group], k, depth, left, decoded, DEPTH);
                tiles(0, x_rows, w_rows[group], block, stride, decoded, DEPTH, depth, ahead, kept_stride, W_TILE, sums + group * W_TILE);
            } else {
                tiles(0, x_rows, w_rows[group], block, stride, kept_at(w, first, k), columns, depth, ahead, columns, W_TILE, sums + group * W_TILE);
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
    const long kept_stride = is_coded ? w->coded.row_bytes / (long)sizeof(scalar) : columns, stride_of_w = is_coded ? DEPTH : columns;
    scalar decoded[W_UNIT * DEPTH] __attribute__((aligned(64)));
    escapes left[W_UNIT];
    for (long n = 0; is_coded && n < W_UNIT; n++)
        if (n % W_TILE < w_rows[n / W_TILE]) left[n] = escapes_at(&w->coded, current->first[n / W_TILE] + n % W_TILE, 0);
    for (long k = 0; k < columns; k += DEPTH) {
        const long depth = columns - k < DEPTH ? columns - k : DEPTH;
        const int is_last = k + depth == columns;
        if (is_coded)
            for (long group = 0; group < W_UNIT / W_TILE; group++)
                if (w_rows[group])
                    decode_rows(&w->coded, current->first[group], w_rows[group], k, depth, left + group * W_TILE, decoded + group * W_TILE * DEPTH,
                                DEPTH);
        for (long i = 0; i < num_tiles; i++) {
            const long m = i * X_TILE, rows = x_rows - m < X_TILE ? x_rows - m : X_TILE;
            long stride;
            const scalar *block = block_of(x, top + m, k, depth, &stride);
            for (long group = 0; group < W_UNIT / W_TILE; group++) {
                if (!w_rows[group]) continue;
                const scalar *ahead = is_last ? kept_at(w, next->first[group], 0) : kept_at(w, current->first[group], k + depth);
                ahead += i * fetched % W_TILE * kept_stride;
                const scalar *rows_of_w = is_coded ? decoded + group * W_TILE * DEPTH : kept_at(w, current->first[group], k);
                float *into = sums + m * W_UNIT + group * W_TILE;
                if (!BY_ROWS || rows == X_TILE || columns <= DEPTH)
                    tiles(1, rows, w_rows[group], block, stride, rows_of_w, stride_of_w, depth, ahead, kept_stride, fetched, into);
                else
                    tiles(0, rows, w_rows[group], block, stride, rows_of_w, stride_of_w, depth, ahead, kept_stride, fetched, into);
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
    float sums[FEW_CODED * W_UNIT + LANES];
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
    scalar *packed;
    long rows, columns, stride;
} packing;

// Packs x. Long rows a multiple of 4 KiB apart would compete for the cache with each other, and packing takes little time beside multiplying.
static void pack_block(const void *given, long piece) {
    const packing *p = given;
    const long k = piece * DEPTH, depth = p->columns - k < DEPTH ? p->columns - k : DEPTH;
    for (long m = 0; m < p->rows; m++) memcpy(p->packed + k * p->rows + m * depth, p->x + m * p->stride + k, depth * sizeof *p->x);
}

static void multiply_by(const scalar *x, weight w, const scalar *bias, void *y, long rows, long outputs, long x_stride, int activation, int wide_output,
                        int threads) {
    const long columns = w.columns, row_bytes = w.coded.codes ? w.coded.row_bytes : columns * (long)sizeof(scalar);
    const long per_unit = activation ? W_UNIT / 2 : W_UNIT, units = (outputs + per_unit - 1) / per_unit;
    const long unit_bytes = W_UNIT * row_bytes, even = units * unit_bytes / (PIECES_OF_THREAD * (threads > 1 ? threads : 1l));
    const long piece_bytes = rows > X_ROWS || even > LARGE_PIECE_BYTES ? LARGE_PIECE_BYTES : even > PIECE_BYTES ? even : PIECE_BYTES;
    const long per_piece = 1 + piece_bytes / (unit_bytes + 1);
    scalar *packed = rows > 1 && columns > DEPTH ? shared_scratch(rows * columns * sizeof *packed) : NULL;  // without memory x is used unpacked, more slowly
    if (packed) {
        const packing p = {x, packed, rows, columns, x_stride};
        share(pack_block, &p, (columns + DEPTH - 1) / DEPTH, 1);
    }
    const operand columns_of_x = packed ? (operand){packed, rows, 0} : (operand){x, rows, x_stride};
    const arguments a = {columns_of_x, w, bias, y, outputs, per_unit, units, per_piece, activation, wide_output};
    const long pieces = (units + per_piece - 1) / per_piece;
    const char *gates = (const char *)kept_at(&w, 0, 0), *ups = activation ? gates + outputs * row_bytes : NULL;
    const reading reads = {.begin = gates, .second = ups, .bytes_of_piece = per_piece * per_unit * row_bytes};
    const int streams = rows <= FEW || (w.coded.codes && rows <= FEW_CODED && rows * columns * (long)sizeof *x <= X_BYTES);
    share_reading(streams ? stream_units : multiply_units, &a, sizeof a, reads, pieces, threads);
}

// activation 0: y [rows][outputs] = x w^T + bias. activation 1 (silu) or 2 (gelu, tanh form): w has 2 * outputs rows, gates then ups, and y = act(gate) *
// up. wide_output: y is fp32 for every scalar type, but rounded to that type.
void NAME(linear)(const scalar *x, const scalar *w, const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation,
                  int wide_output, int threads) {
    multiply_by(x, (weight){w, {0}, columns}, bias, y, rows, outputs, x_stride, activation, wide_output, threads);
}

// The same with a weight in 12 bits.
void NAME(lossless_linear)(const scalar *x, const uint8_t *codes, const uint8_t *palettes, const int32_t *starts, const uint32_t *escapes,
                           const scalar *bias, void *y, long rows, long outputs, long columns, long x_stride, int activation, int wide_output,
                           int threads) {
    const coded coded = {codes, palettes, starts, escapes, coded_row_bytes(columns)};
    multiply_by(x, (weight){NULL, coded, columns}, bias, y, rows, outputs, x_stride, activation, wide_output, threads);
}
