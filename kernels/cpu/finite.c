// Whether weights are numbers: read once, as fast as memory is.
#include "lanes.h"

#ifdef SCALAR_BF16
typedef uint16_t word;
#define EXPONENT 0x7f80
#else
typedef uint32_t word;
#define EXPONENT 0x7f800000u
#endif
#define BLOCK_ELEMENTS 4096  // between two looks at what has been found

// 1: each of the `count` elements is a number, wherever in memory they begin. NaN and infinity have all bits of the exponent set, and nothing else has.
int NAME(are_finite)(const char *x, long count) {
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

#ifndef SCALAR_BF16  // compiled once
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#define STEP_BYTES (1L << 20)
#define ANNOUNCED_BYTES (8L << 20)
#define SLOW_NS 1000000  // ten times what a step takes in memory: it came from a disk

int are_finite_bf16(const char *x, long count);

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

// That what follows is about to be looked at: from a disk it comes in large pieces then, not page by page.
static void announce(int fd, long begin) {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(fd, begin, ANNOUNCED_BYTES, POSIX_FADV_WILLNEED);
#endif
}

typedef struct {
    const char *mapped;
    long fd;
    const long *ranges;  // each {begin, end, bytes of an element}
    long num_ranges;
    atomic_long looked;  // all elements in ranges that end here or before are numbers
} looked_file;

typedef struct {
    pthread_t thread;
    looked_file *files;
    long num_files;
    const atomic_int *stop;
} looker;

// Pages are mapped by touching them, which takes no lock that the process's other threads may wait for: this one may be kept from running at any time.
static int look(looked_file *file, const atomic_int *stop) {
    long announced = 0, before = now_ns();
    for (const long *range = file->ranges; range < file->ranges + 3 * file->num_ranges; range += 3) {
        const long end = range[1], item = range[2];
        for (long begin = range[0]; begin < end; begin += STEP_BYTES) {
            if (atomic_load_explicit(stop, memory_order_relaxed)) return 0;
            const long step = end - begin < STEP_BYTES ? end - begin : STEP_BYTES;
            const char *values = file->mapped + begin;
            if (!(item == 2 ? are_finite_bf16(values, step / 2) : are_finite_f32(values, step / 4))) return 0;
            atomic_store_explicit(&file->looked, begin + step, memory_order_release);
            const long now = now_ns();
            if (now - before > SLOW_NS && announced < begin + step + ANNOUNCED_BYTES) {
                if (announced < begin + step) announced = begin + step;
                announce((int)file->fd, announced);
                announced += ANNOUNCED_BYTES;
            }
            before = now;
        }
    }
    return 1;
}

static void *look_at_all(void *given) {
    looker *all = given;
#ifdef __linux__
    setpriority(PRIO_PROCESS, 0, 19);  // of this thread alone: the cores belong to the imports
#endif
    for (long i = 0; i < all->num_files && look(all->files + i, all->stop); i++) {}
    return NULL;
}

// Begins to look at files, in order, until one holds what is no number or `stop` is set, in a thread that never waits for Python: one that held its lock
// at so low a priority would hold up everybody. NULL: there is no thread to be had.
void *look_ahead(looked_file *files, long num_files, const atomic_int *stop) {
    looker *all = malloc(sizeof *all);
    if (!all) return NULL;
    *all = (looker){.files = files, .num_files = num_files, .stop = stop};
    if (pthread_create(&all->thread, NULL, look_at_all, all) == 0) return all;
    free(all);
    return NULL;
}

// Waits for its end.
void look_ahead_end(void *given) {
    looker *all = given;
    pthread_join(all->thread, NULL);
    free(all);
}
#endif
