// Low-rank adapters beside a matrix product: y[token] += B (A x[token]), each token with the adapter of its slot.
//
// With one token per adapter, reading A and B takes all the time; they are fetched ahead (4 layers of 1,024 channels, sixteen adapters of rank 16, one
// thread: 1.92 ms, and 2.28 without fetching). Tokens of a prompt share an adapter, and read it from the cache. The order in which a token is summed
// depends only on rank and columns, so other tokens and their adapters change none of its bits.
#include "lanes.h"
#include "program.h"

#define COLUMNS 64         // columns of y in a block of B
#define MOST_RANK 64
#define MOST_PARTS 3
#define MOST_TOKENS 16     // tokens of a prompt that are multiplied with rows of A at a time
#define FEW_TOKENS 32      // up to so many tokens each is a separate piece
#define A_ROWS 8           // rows of A in a piece
#define BLOCKS 8           // blocks of B in a piece
#define A_TILE 4
#define X_TILE 4

typedef struct {
    int64_t a, b, rank;  // a, b: offsets in `adapters`, counted in values
} place;

typedef struct {
    scalar *y;
    const scalar *x, *adapters;
    const place *places;
    const int64_t *slots;
    float *u;  // [tokens][parts][MOST_RANK]
    long tokens, outputs, columns, x_stride, num_slots, slot_stride, parts, tokens_per_piece, blocks;
    long ends[MOST_PARTS];
} arguments;

INLINE const place *place_of(const arguments *a, long token, long part) {
    const int64_t slot = a->slots[token];
    return slot < 0 || slot >= a->num_slots ? NULL : (const place *)((const int64_t *)a->places + slot * a->slot_stride) + part;
}

// Returns the end of the run of tokens from `token` on, before `end`, that have the same adapter.
INLINE long run_from(const arguments *a, long token, long end) {
    long next = token + 1;
    while (next < end && a->slots[next] == a->slots[token]) next++;
    return next;
}

// u[m][n] = x[m] . w[n] for A_TILE rows of A
INLINE void dots(const int x_rows, const scalar *x, long x_stride, const scalar *w, long columns, float *u, long u_stride) {
    lanes sum[X_TILE * A_TILE];
    for (int i = 0; i < x_rows * A_TILE; i++) sum[i] = all(0);
    long k = 0;
    for (; k + PIECE <= columns; k += PIECE) {
        piece rows[A_TILE];
#pragma GCC unroll 4
        for (int n = 0; n < A_TILE; n++) rows[n] = load_piece(w + n * columns + k);
#pragma GCC unroll 4
        // Rows are too short for the hardware prefetcher.
        for (int n = 0; n < A_TILE && x_rows == 1; n++) __builtin_prefetch(w + (n + A_TILE) * columns + k, 0, 3);
#pragma GCC unroll 4
        for (int m = 0; m < x_rows; m++) {
            const piece row = load_piece(x + m * x_stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < A_TILE; n++) sum[m * A_TILE + n] = multiply_add(sum[m * A_TILE + n], rows[n], row);
        }
    }
    if (k < columns)
        for (int m = 0; m < x_rows; m++) {
            const piece row = part_of_piece(x + m * x_stride + k, columns - k);
            for (int n = 0; n < A_TILE; n++)
                sum[m * A_TILE + n] = multiply_add(sum[m * A_TILE + n], part_of_piece(w + n * columns + k, columns - k), row);
        }
    for (int m = 0; m < x_rows; m++)
        for (int n = 0; n < A_TILE; n++) u[m * u_stride + n] = sum_of(sum[m * A_TILE + n]);
}

// A piece is some rows of A, of one part, and some tokens.
static void shrink(const void *given, long piece) {
    const arguments *a = given;
    const long chunk = piece % (MOST_RANK / A_ROWS) * A_ROWS, rest = piece / (MOST_RANK / A_ROWS);
    const long part = rest % a->parts, begin = rest / a->parts * a->tokens_per_piece;
    const long end = begin + a->tokens_per_piece < a->tokens ? begin + a->tokens_per_piece : a->tokens;
    const long u_stride = a->parts * MOST_RANK;
    for (long token = begin, next; token < end; token = next) {
        next = run_from(a, token, end);
        const place *p = place_of(a, token, part);
        if (!p || chunk >= p->rank) continue;
        for (long row = chunk; row < chunk + A_ROWS && row < p->rank; row += A_TILE) {
            const scalar *w = a->adapters + p->a + row * a->columns;
            long t = token;
            for (; t + X_TILE <= next; t += X_TILE)
                dots(X_TILE, a->x + t * a->x_stride, a->x_stride, w, a->columns, a->u + t * u_stride + part * MOST_RANK + row, u_stride);
            for (; t < next; t++)
                dots(1, a->x + t * a->x_stride, a->x_stride, w, a->columns, a->u + t * u_stride + part * MOST_RANK + row, u_stride);
        }
    }
}

// y[0 .. count] += b^T u for one block of B.
INLINE void add_block(scalar *y, long count, const scalar *b, const float *u, long rank) {
    lanes sum[COLUMNS / LANES];
    for (int i = 0; i < COLUMNS / LANES; i++) sum[i] = all(0);
    for (long j = 0; j < rank; j++, b += COLUMNS) {
        const lanes factor = all(u[j]);
        for (long i = 0; i < COLUMNS; i += 64 / (long)sizeof *b) __builtin_prefetch(b + 2 * rank * COLUMNS + i, 0, 3);  // two blocks ahead
#pragma GCC unroll 16
        for (int i = 0; i < COLUMNS / LANES; i++) sum[i] += factor * load(b + i * LANES);
    }
    for (int i = 0; i < COLUMNS / LANES && i * LANES < count; i++) {
        const long n = count - i * LANES;
        if (n >= LANES) store(y + i * LANES, load(y + i * LANES) + sum[i]);
        else store_part(y + i * LANES, load_part(y + i * LANES, n) + sum[i], n);
    }
}

// A piece is some blocks of B, of one or more parts, and some tokens.
static void expand(const void *given, long piece) {
    const arguments *a = given;
    const long chunks = (a->blocks + BLOCKS - 1) / BLOCKS, first = piece % chunks * BLOCKS, begin = piece / chunks * a->tokens_per_piece;
    const long end = begin + a->tokens_per_piece < a->tokens ? begin + a->tokens_per_piece : a->tokens;
    for (long token = begin, next; token < end; token = next) {
        next = run_from(a, token, end);
        if (!place_of(a, token, 0)) continue;
        long top = 0, start = 0;  // first block and first column of the part
        for (long part = 0; part < a->parts; part++) {
            const long size = a->ends[part] - start, blocks = (size + COLUMNS - 1) / COLUMNS;
            const place *p = place_of(a, token, part);
            for (long block = first > top ? first : top; p->rank && block < first + BLOCKS && block < top + blocks; block++) {
                const long at = (block - top) * COLUMNS, count = size - at < COLUMNS ? size - at : COLUMNS;
                const scalar *b = a->adapters + p->b + at * p->rank;
                for (long t = token; t < next; t++)
                    add_block(a->y + t * a->outputs + start + at, count, b, a->u + (t * a->parts + part) * MOST_RANK, p->rank);
            }
            top += blocks, start = a->ends[part];
        }
    }
}

// Returns 1 if A and B of all slots in use are inside the adapters' values.
static int lie_inside(const arguments *a, long num_values) {
    for (long token = 0; token < a->tokens; token++) {
        const int64_t slot = a->slots[token];
        if (slot < 0) continue;
        if (slot >= a->num_slots) return 0;
        for (long part = 0, start = 0; part < a->parts; start = a->ends[part++]) {
            const place *p = place_of(a, token, part);
            const long blocks = (a->ends[part] - start + COLUMNS - 1) / COLUMNS;
            if (!p->rank) continue;
            if (p->rank < 0 || p->rank > MOST_RANK || p->rank % A_ROWS || p->a < 0 || p->b < 0) return 0;
            if (p->a > num_values - p->rank * a->columns || p->b > num_values - blocks * p->rank * COLUMNS) return 0;
        }
    }
    return 1;
}

// Changes y [tokens][outputs]. places [num_slots][parts] of (A, B, rank), slots `slot_stride` numbers apart; A and B are offsets below `num_values`. slots
// [tokens]: below 0 for a token without an adapter. end0 .. end2: the column after each part. Returns 0, without any change, if there is no memory or an
// adapter is outside the values.
int NAME(add_lora)(scalar *y, const scalar *x, const scalar *adapters, const int64_t *places, const int64_t *slots, long tokens, long outputs,
                   long columns, long x_stride, long num_values, long num_slots, long slot_stride, long parts, long end0, long end1, long end2, int threads) {
    float *u = shared_scratch(tokens * parts * MOST_RANK * sizeof *u);
    if (!u) return 0;
    arguments a = {y, x, adapters, (const place *)places, slots, u, tokens, outputs, columns, x_stride, num_slots, slot_stride, parts};
    a.ends[0] = end0, a.ends[1] = end1, a.ends[2] = end2;
    if (!lie_inside(&a, num_values)) return 0;
    a.tokens_per_piece = tokens <= FEW_TOKENS ? 1 : MOST_TOKENS;
    for (long part = 0, start = 0; part < parts; start = a.ends[part++]) a.blocks += (a.ends[part] - start + COLUMNS - 1) / COLUMNS;
    const long token_pieces = (tokens + a.tokens_per_piece - 1) / a.tokens_per_piece;
    share(shrink, &a, token_pieces * parts * (MOST_RANK / A_ROWS), threads);
    share(expand, &a, token_pieces * ((a.blocks + BLOCKS - 1) / BLOCKS), threads);
    return 1;
}
