// The activations of gated feed-forwards, by number: 1 is silu, 2 is gelu in its tanh form.
#pragma once
#include "lanes.h"

// silu is x * sigmoid(x); gelu's tanh form, x * (1 + tanh(u)) / 2, is x * sigmoid(2 u).
INLINE lanes activate(int activation, lanes x) {
    const lanes u = activation == 1 ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-u));
}

// Rounds to the storage type after each step, as separate operations would: the products, the activation, and the product of both.
INLINE lanes gated(int activation, lanes gate, lanes up) { return as_stored(activate(activation, as_stored(gate))) * as_stored(up); }
