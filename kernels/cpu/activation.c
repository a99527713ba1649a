// Gated activations of whole prompts: gate and up lie side by side, as the fused matrix product left them.
#include "activation.h"

#define SERIAL_ELEMENTS (1 << 13)

// x [tokens][2 * size] -> y [tokens][size]; activation 1: silu, 2: gelu in its tanh form.
void NAME(gated_activation)(const scalar *x, scalar *y, long tokens, long size, int activation, int threads) {
    if (tokens * size < SERIAL_ELEMENTS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const scalar *gate = x + token * 2 * size, *up = gate + size;
        scalar *into = y + token * size;
        long i = 0;
        for (; i + LANES <= size; i += LANES) store(into + i, gated(activation, load(gate + i), load(up + i)));
        if (i < size) store_part(into + i, gated(activation, load_part(gate + i, size - i), load_part(up + i, size - i)), size - i);
    }
}
