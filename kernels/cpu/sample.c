// The parts of kernels/sampling/sample.py and kernels/sampling/philox.py that process every logit or row, with the same bits as their torch forms.
#ifndef SCALAR_BF16  // compiled only once
#include "team.h"

#include <stdint.h>

// A product and the following sum are rounded separately, as in all other forms.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#pragma STDC FP_CONTRACT OFF

#define SUMMED 1024  // logits per sum, as in kernels/sampling/sample.py
#define SUMS_OF_PIECE 8
#define FAR (63 << 24)

typedef struct {
    const float *logits, *tops;
    const double *scales;
    const int64_t *floors;
    int64_t *sums;
    long vocab, stride, sums_of_row, pieces_of_row;
} arguments;

static int64_t weight_up_to(int32_t floor, const float *logits, long count, float top, float scale) {
    int64_t sum = 0;
    for (long i = 0; i < count; i++) {
        const float distance = (top - logits[i]) * scale;
        const int32_t cost = (int32_t)(distance < (float)FAR ? distance : (float)FAR);  // NaN becomes FAR, too
        const float part = (float)(cost & 0xffffff) * 0x1p-24f;
        float power = -15852.8515625f * part;
        power = power + 154447.65625f;
        power = power * part;
        power = power + -927735.75f;
        power = power * part;
        power = power + 4029554.25f;
        power = power * part;
        power = power + -11629022.0f;
        power = power * part;
        power = power + 16777216.0f;
        sum += cost <= floor ? ((int64_t)(int32_t)power << 18) >> (cost >> 24) : 0;
    }
    return sum;
}

static void add_up(const void *given, long piece) {
    const arguments *a = given;
    const long row = piece / a->pieces_of_row, begin = piece % a->pieces_of_row * SUMS_OF_PIECE;
    for (long i = begin; i < begin + SUMS_OF_PIECE && i < a->sums_of_row; i++) {
        const long at = i * SUMMED, count = a->vocab - at < SUMMED ? a->vocab - at : SUMMED;
        a->sums[row * a->sums_of_row + i] =
            weight_up_to((int32_t)a->floors[row], a->logits + row * a->stride + at, count, a->tops[row], (float)a->scales[row]);
    }
}

// Sums the weights of logits that cost at most their row's floor, over 1,024 logits each. Rows of `logits` are `stride` floats apart.
void sampling_sums(const float *logits, const float *tops, const double *scales, const int64_t *floors, int64_t *sums, long rows, long vocab,
                   long stride, int threads) {
    const long sums_of_row = (vocab + SUMMED - 1) / SUMMED;
    const arguments a = {logits,      tops, scales, floors, sums, vocab, stride, sums_of_row, (sums_of_row + SUMS_OF_PIECE - 1) / SUMS_OF_PIECE};
    share(add_up, &a, rows * a.pieces_of_row, threads);
}

typedef struct {
    const float *logits;
    int64_t *ids;
    float *tops;
    long vocab, stride;
} rows;

// Finds a row's highest logit; it is NaN if the row has a NaN, as in torch.
static void find_top(const void *given, long row) {
    const rows *a = given;
    const float *logits = a->logits + row * a->stride;
    float tops[16];
    int is_nan[16] = {0};
    for (int j = 0; j < 16; j++) tops[j] = logits[0];
    long i = 0;
    for (; i + 16 <= a->vocab; i += 16)
        for (int j = 0; j < 16; j++) {
            tops[j] = logits[i + j] > tops[j] ? logits[i + j] : tops[j];
            is_nan[j] |= logits[i + j] != logits[i + j];
        }
    for (; i < a->vocab; i++) {
        tops[0] = logits[i] > tops[0] ? logits[i] : tops[0];
        is_nan[0] |= logits[i] != logits[i];
    }
    float top = tops[0];
    int has_nan = is_nan[0];
    for (int j = 1; j < 16; j++) {
        top = tops[j] > top ? tops[j] : top;
        has_nan |= is_nan[j];
    }
    long id = 0;
    if (has_nan)
        while (logits[id] == logits[id]) id++;
    else
        while (logits[id] != top) id++;
    a->ids[row] = id, a->tops[row] = logits[id];
}

// Writes the index of the first highest logit of each row, and that logit. Rows of `logits` are `stride` floats apart.
void argmax(const float *logits, int64_t *ids, float *tops, long num_rows, long vocab, long stride, int threads) {
    const rows a = {logits, ids, tops, vocab, stride};
    share(find_top, &a, num_rows, threads);
}

// Runs Philox4x32-10 for each row. The counter is the position, the key is the seed; 53 bits of the first two words give a number in [0, 1).
void philox_uniform(const int64_t *seeds_low, const int64_t *seeds_high, const int64_t *positions, double *numbers, long rows) {
    for (long row = 0; row < rows; row++) {
        uint32_t key[2] = {(uint32_t)seeds_low[row], (uint32_t)seeds_high[row]};
        uint32_t word[4] = {(uint32_t)positions[row], (uint32_t)((uint64_t)positions[row] >> 32), 0, 0};
        for (int round = 0; round < 10; round++) {
            const uint64_t even = (uint64_t)word[0] * 0xD2511F53u, odd = (uint64_t)word[2] * 0xCD9E8D57u;
            const uint32_t next[4] = {(uint32_t)(odd >> 32) ^ word[1] ^ key[0], (uint32_t)odd, (uint32_t)(even >> 32) ^ word[3] ^ key[1],
                                      (uint32_t)even};
            for (int i = 0; i < 4; i++) word[i] = next[i];
            key[0] += 0x9E3779B9u;
            key[1] += 0xBB67AE85u;
        }
        numbers[row] = (double)((uint64_t)word[0] << 21 | word[1] >> 11) * 0x1p-53;
    }
}
#endif
