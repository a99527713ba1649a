// Turns the sums of a matrix product into outputs: adds the bias, applies a gated activation, rounds.
#pragma once
#include "activation.h"

// Writes `count` outputs. With an activation `sums` has those of the gates and, from index `half` on, those of the ups. Some lanes after the last sum are
// read but not used.
INLINE void finish(const float *sums, const long half, const scalar *bias, long outputs, long count, int activation, int wide_output, void *y) {
    for (long i = 0; i < count; i += LANES) {
        const long n = count - i < LANES ? count - i : LANES;
        lanes value = load_f32(sums + i);
        if (bias) value += load_part(bias + i, n);
        if (activation) {
            lanes up = load_f32(sums + half + i);
            if (bias) up += load_part(bias + outputs + i, n);
            value = gated(activation, value, up);
        }
        if (wide_output) {
            memcpy((float *)y + i, &value, n * sizeof(float));
        } else if (n == LANES) {
            store((scalar *)y + i, value);
        } else {
            store_part((scalar *)y + i, value, n);
        }
    }
}
