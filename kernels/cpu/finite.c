// Checks that weights are finite, reading them once at the speed of memory.
#include "lanes.h"

#ifdef SCALAR_BF16
typedef uint16_t word;
#define EXPONENT 0x7f80
#else
typedef uint32_t word;
#define EXPONENT 0x7f800000u
#endif
#define BLOCK_ELEMENTS 4096  // elements between two checks of the result so far

// Returns 1 if each of the `count` elements is finite; x need not be aligned. NaN and infinity are the values whose exponent bits are all set.
int NAME(is_finite)(const char *x, long count) {
    for (long begin = 0; begin < count; begin += BLOCK_ELEMENTS) {
        const long end = begin + BLOCK_ELEMENTS < count ? begin + BLOCK_ELEMENTS : count;
        word largest = 0;
        for (long i = begin; i < end; i++) {
            word bits;
            memcpy(&bits, x + i * (long)sizeof bits, sizeof bits);
            bits &= EXPONENT;
            largest = bits > largest ? bits : largest;
        }
        if (largest == EXPONENT) return 0;
    }
    return 1;
}
