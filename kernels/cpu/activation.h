// The activations of gated feed-forwards, by number: 1 silu, 2 gelu in its tanh form.
#pragma once
#include "lanes.h"

// silu is x * sigmoid(x); gelu's tanh form, x * (1 + tanh(u)) / 2, is x * sigmoid(2 u).
INLINE lanes activate(int activation, lanes x) {
    const lanes u = activation == 1 ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-u));
}

// Rounded where separate steps would round: products, activation, their product.
INLINE lanes gated(int activation, lanes gate, lanes up) { return as_stored(activate(activation, as_stored(gate))) * as_stored(up); }
