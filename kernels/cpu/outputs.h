// How sums of a matrix product become outputs: bias, gated activation, rounding.
#pragma once
#include "activation.h"

// `count` outputs from their sums; with an activation these are the gates' and, `half` behind them, the ups'. Some lanes behind the last sum are
// read, and not used.
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
            value = as_stored(value);
            memcpy((float *)y + i, &value, n * sizeof(float));
        } else if (n == LANES) {
            store((scalar *)y + i, value);
        } else {
            store_part((scalar *)y + i, value, n);
        }
    }
}
