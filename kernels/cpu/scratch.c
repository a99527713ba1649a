// Scratch memory, freed when its thread ends.
#ifndef SCALAR_BF16  // compiled only once
#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

#define CACHE_LINE 64

typedef struct {
    _Alignas(CACHE_LINE) size_t size;
} scratch;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int has_key;

static void make_key(void) { has_key = !pthread_key_create(&key, free); }

void *scratch_of(size_t size) {
    pthread_once(&once, make_key);
    if (!has_key) return NULL;
    scratch *mine = pthread_getspecific(key);
    if (mine && mine->size >= size) return mine + 1;
    free(mine);
    size = (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    mine = aligned_alloc(CACHE_LINE, sizeof *mine + size);
    if (mine) mine->size = size;
    if (pthread_setspecific(key, mine)) {
        free(mine);
        return NULL;
    }
    return mine ? mine + 1 : NULL;
}
#endif
