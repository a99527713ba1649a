// Short causal convolutions with states (kernels/state/short_conv.py has the formula). Sums are fp32, in the order of the inputs.
#include "activation.h"
#include "states.h"

#define SLAB 256  // channels of a piece
#define MOST_WIDTH 16

typedef struct {
    const scalar *x, *weight, *bias;
    scalar *states, *y;
    runs runs;
    long channels, width, x_stride, state_stride, slabs;
    int activates;
} arguments;

static void convolve(const void *given, long piece) {
    const arguments *a = given;
    const long sequence = piece / a->slabs, begin = piece % a->slabs * SLAB, before = a->width - 1;
    const long n = a->channels - begin < SLAB ? a->channels - begin : SLAB;
    float columns[MOST_WIDTH][SLAB], biases[SLAB];
    scalar earlier[MOST_WIDTH][SLAB];  // inputs before the first token, copied because a run may overwrite them
    for (long i = 0; i < SLAB; i++) {
        for (long j = 0; j < a->width; j++) columns[j][i] = i < n ? get(a->weight[(begin + i) * a->width + j]) : 0.0f;
        biases[i] = a->bias && i < n ? get(a->bias[begin + i]) : 0.0f;
    }
    const int64_t block = a->runs.before[sequence];
    for (long j = 0; j < before; j++)
        if (block < 0) memset(earlier[j], 0, sizeof earlier[j]);
        else memcpy(earlier[j], a->states + block * a->state_stride + j * a->channels + begin, n * sizeof(scalar));
    const long first = first_token(&a->runs, sequence);
    long token = first;
    for (long run = a->runs.first_runs[sequence]; run < a->runs.first_runs[sequence + 1]; run++) {
        const scalar *rows[MOST_WIDTH];
        for (;; token++) {
            for (long j = 0; j < a->width; j++) {
                const long at = token - before + j;
                rows[j] = at < first ? earlier[at - first + before] : a->x + at * a->x_stride + begin;
            }
            if (token == a->runs.ends[run]) break;
            scalar *y = a->y + token * a->channels + begin;
            for (long i = 0; i < n; i += LANES) {
                const long left = n - i;
                lanes sum = load_f32(biases + i);
                for (long j = 0; j < a->width; j++) sum += load_f32(columns[j] + i) * (left < LANES ? load_part(rows[j] + i, left) : load(rows[j] + i));
                if (a->activates) sum = activate(1, sum);
                if (left < LANES) store_part(y + i, sum, left);
                else store(y + i, sum);
            }
        }
        for (long j = 0; j < before && a->runs.after[run] >= 0; j++)
            memcpy(a->states + a->runs.after[run] * a->state_stride + j * a->channels + begin, rows[j], n * sizeof(scalar));
    }
}

// x [tokens][channels], rows x_stride apart; weight [channels][width]; bias [channels] or NULL; states: blocks of [width - 1][channels], state_stride
// apart -> y [tokens][channels].
void NAME(short_conv)(const scalar *x, const scalar *weight, const scalar *bias, scalar *states, scalar *y, const int64_t *before,
                      const int64_t *first_runs, const int64_t *ends, const int64_t *after, long sequences, long channels, long width, long x_stride,
                      long state_stride, int activates, int threads) {
    const long slabs = (channels + SLAB - 1) / SLAB;
    const arguments a = {x, weight, bias, states, y, {before, first_runs, ends, after}, channels, width, x_stride, state_stride, slabs, activates};
    share(convolve, &a, sequences * slabs, threads);
}
