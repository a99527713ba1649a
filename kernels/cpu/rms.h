// Root-mean-square normalisation of one row or head. Statistics and products are fp32, whatever the storage type.
#pragma once
#include "lanes.h"

// Weights have the storage type of the rows, or are fp32 (`wide`) in models that add an offset to them.
INLINE lanes weight_at(const void *weight, int wide, long i) { return wide ? load_f32((const float *)weight + i) : load((const scalar *)weight + i); }

INLINE float weight_of(const void *weight, int wide, long i) { return wide ? ((const float *)weight)[i] : get(((const scalar *)weight)[i]); }

// y may equal x.
static void normalise(const scalar *x, const void *weight, int wide_weight, float eps, scalar *y, long size) {
    lanes squares[4] = {all(0), all(0), all(0), all(0)};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            lanes v = load(x + i + j * LANES);
            squares[j] += v * v;
        }
    float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < size; i++) sum += get(x[i]) * get(x[i]);
    const float factor = 1.0f / sqrtf(sum / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * factor * weight_at(weight, wide_weight, i));
    for (; i < size; i++) y[i] = put(get(x[i]) * factor * weight_of(weight, wide_weight, i));
}
