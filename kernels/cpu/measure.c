// Reads memory once: the limit of the machine with which benchmarks are compared.
#ifndef SCALAR_BF16  // compiled only once
#include "lanes.h"

#include <stdatomic.h>

#define PIECE_FLOATS (1 << 18)

typedef struct {
    const float *words;
    long count;
    atomic_llong *total;
} arguments;

static void read_piece(const void *given, long piece) {
    const arguments *a = given;
    const long begin = piece * PIECE_FLOATS, end = begin + PIECE_FLOATS < a->count ? begin + PIECE_FLOATS : a->count;
    lanes_u32 sums[4] = {{0}, {0}, {0}, {0}};
    for (long i = begin; i + 4 * LANES <= end; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += (lanes_u32)load_f32(a->words + i + j * LANES);
    lanes_u32 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    long long total = 0;
    for (int i = 0; i < LANES; i++) total += sum[i];
    atomic_fetch_add(a->total, total);
}

// Returns the sum of `count` words, a multiple of 64. The sum keeps the compiler from omitting a load.
long long sum_words(const void *words, long count, int threads) {
    atomic_llong total = 0;
    const arguments a = {words, count, &total};
    share(read_piece, &a, (count + PIECE_FLOATS - 1) / PIECE_FLOATS, threads);
    return total;
}
#endif
