// Sets the logits of forbidden tokens to the lowest number, as kernels/sampling/masks.py does.
#ifndef SCALAR_BF16  // compiled only once
#include "team.h"

#include <float.h>
#include <stdint.h>

typedef struct {
    float *logits;
    const int64_t *rows;
    const uint32_t *bits;
    long vocab, words;
} masks;

static void mask_row(const void *given, long mask) {
    const masks *a = given;
    float *logits = a->logits + a->rows[mask] * a->vocab;
    const uint32_t *bits = a->bits + mask * a->words;
    const long whole = a->vocab / 32 < a->words ? a->vocab / 32 : a->words;
    for (long word = 0; word < whole; word++) {
        const uint32_t allowed = bits[word];
        if (allowed == UINT32_MAX) continue;
        float *of_word = logits + 32 * word;
        for (int j = 0; j < 32; j++) of_word[j] = allowed >> j & 1 ? of_word[j] : -FLT_MAX;
    }
    for (long i = 32 * whole; i < a->vocab; i++)
        if (i / 32 >= a->words || !(bits[i / 32] >> i % 32 & 1)) logits[i] = -FLT_MAX;
}

void mask_logits(float *logits, const int64_t *rows, const uint32_t *bits, long num_masks, long vocab, long words, int threads) {
    const masks a = {logits, rows, bits, vocab, words};
    share(mask_row, &a, num_masks, threads);
}
#endif
