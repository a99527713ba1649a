// A decode step as the steps that its calls shared among threads, recorded once and done again in one call.
//
// One after the other, each call wakes the team, waits for it, and goes through Python: some microseconds, two hundred times a token. Here threads stay
// together from the first step to the last. A step begins when all pieces of the one before are done; a thread that is late finds them done, as it finds
// those of team.c. A thread that waits fetches what it will read next, so that memory never rests.
//
// Replayed, steps compute what they computed: arguments are the same, and what they point to is read anew. The recorder keeps all of that in place.
#ifndef SCALAR_BF16  // compiled once
#include "program.h"

#include "scratch.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CACHE_LINE 128
#define LINE 64                   // that is fetched at once
#define MOST_AHEAD (384 << 10)    // bytes that a thread fetches while it waits: they have to stay in its second-level cache
#define LINES_PER_LOOK 8
#define PARTS_PER_PIECE 2

typedef struct {
    piece_of_work work;
    void *arguments;
    long pieces, end;  // end: of the program's pieces up to here
    reading reads;
    long ahead;  // the next step that reads from a beginning on; this one, if it does
    long soon;   // the step behind this one, or behind the next, that says by itself what it reads
} step;

typedef struct block {
    struct block *next;
    size_t size;
} block;

struct program {
    step *steps;
    long count, room;
    int threads, failed;
    block **scratch;
};

_Thread_local program *recorded;

// Which step a thread's pieces are of, and which of them is next, in one number. The first thread that comes to a step makes it that step's.
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t next;
} place;

static place places[MOST_THREADS];               // of the program that has the team
static _Alignas(CACHE_LINE) atomic_long done;    // pieces, of all steps

void record_step(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces) {
    program *p = recorded;
    if (p->count == p->room) {
        const long room = p->room ? 2 * p->room : 64;
        step *steps = realloc(p->steps, room * sizeof *steps);
        if (!steps) {
            p->failed = 1;
            return;
        }
        p->steps = steps, p->room = room;
    }
    void *copy = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (!copy || pieces > UINT32_MAX) {
        free(copy);
        p->failed = 1;
        return;
    }
    memcpy(copy, arguments, size);
    const long before = p->count ? p->steps[p->count - 1].end : 0;
    p->steps[p->count++] = (step){work, copy, pieces, before + pieces, reads, -1, -1};
}

void *shared_scratch(size_t size) {
    if (!recorded) return scratch_of(size);
    for (block *b = *recorded->scratch; b; b = b->next)  // free again when its step is done, so all programs of a workspace share it
        if (b->size >= size) return (char *)b + CACHE_LINE;
    block *b = aligned_alloc(CACHE_LINE, (size + 2 * CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!b) return NULL;
    *b = (block){*recorded->scratch, size};
    *recorded->scratch = b;
    return (char *)b + CACHE_LINE;
}

static long first_piece(const program *p, const step *s, int id) { return s->pieces * id / p->threads; }

// Of step `index`, the next of the pieces that thread `owner` takes first; -1: none is left.
static long next_piece(const program *p, long index, int owner) {
    const step *s = &p->steps[index];
    const long end = first_piece(p, s, owner + 1);
    const uint64_t of_step = (uint64_t)(index + 1) << 32;
    uint64_t seen = atomic_load_explicit(&places[owner].next, memory_order_relaxed);
    for (;;) {
        if (seen >> 32 > (uint64_t)index + 1) return -1;
        const long piece = seen < of_step ? first_piece(p, s, owner) : (long)(seen - of_step);
        if (piece >= end) return -1;
        if (atomic_compare_exchange_weak_explicit(&places[owner].next, &seen, of_step + piece + 1, memory_order_relaxed, memory_order_relaxed))
            return piece;
    }
}

// The bytes that a thread fetches while it waits: of its own pieces of the next step that reads a stream.
typedef struct {
    long step, at, end;  // in bytes behind the beginnings of the stream
} fetching;

static void fetch(const program *p, int id, long index, fetching *f) {
    const step *s = &p->steps[index];
    if (f->step != index) {
        const long most = s->reads.second ? MOST_AHEAD / 2 : MOST_AHEAD;
        const long begin = first_piece(p, s, id) * s->reads.bytes_of_piece, end = first_piece(p, s, id + 1) * s->reads.bytes_of_piece;
        *f = (fetching){index, begin, end - begin < most ? end : begin + most};
    }
    for (int i = 0; i < LINES_PER_LOOK && f->at < f->end; i++, f->at += LINE) {
        __builtin_prefetch(s->reads.begin + f->at, 0, 2);
        if (s->reads.second) __builtin_prefetch(s->reads.second + f->at, 0, 2);
    }
}

// Fetches the next parts that the thread's first piece of a step reads; returns the number of parts that have been fetched.
static long fetch_parts(const program *p, const step *s, int id, long part) {
    const long piece = first_piece(p, s, id);
    if (piece == first_piece(p, s, id + 1)) return part;
    for (int i = 0; i < PARTS_PER_PIECE && s->reads.fetch(s->arguments, piece, part); i++) part++;
    return part;
}

static void take_steps(const void *what, int id) {
    const program *p = what;
    fetching ahead = {-1, 0, 0};
    long soon = -1, part = 0;
    for (long index = 0; index < p->count; index++) {
        const step *s = &p->steps[index];
        if (atomic_load_explicit(&done, memory_order_acquire) >= s->end) continue;
        const int is_last = index + 1 == p->count;
        if (!is_last)
            for (long line = 0; line < 3; line++) __builtin_prefetch((char *)s[1].arguments + line * LINE);
        long taken = 0;
        for (int i = 0; i < p->threads; i++)
            for (long piece; (piece = next_piece(p, index, (id + i) % p->threads)) >= 0; taken++) {
                if (s->soon >= 0) {
                    if (s->soon != soon) soon = s->soon, part = 0;
                    part = fetch_parts(p, &p->steps[soon], id, part);
                }
                s->work(s->arguments, piece);
            }
        if (taken) atomic_fetch_add_explicit(&done, taken, memory_order_acq_rel);
        const long next = is_last ? -1 : s[1].ahead;
        for (int look = 0; atomic_load_explicit(&done, memory_order_acquire) < s->end; look++) {
            if (next >= 0 && (ahead.step != next || ahead.at < ahead.end)) fetch(p, id, next, &ahead);
            else wait_a_little(look);
        }
    }
}

// Memory shared by programs that never run at the same time.
block **workspace_new(void) { return calloc(1, sizeof(block *)); }

void workspace_free(block **scratch) {
    for (block *b = *scratch, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(scratch);
}

// Begins to record this thread's calls, which are computed as always. NULL without memory.
program *program_begin(block **scratch, int threads) {
    program *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    p->scratch = scratch;
    recorded = p;
    return p;
}

// Ends the recording; returns the number of steps, or -1 if memory did not suffice for all of them.
long program_end(program *p) {
    recorded = NULL;
    long ahead = -1;
    for (long index = p->count - 1; index >= 0; index--) {
        step *s = &p->steps[index];
        if (s->reads.begin) ahead = index;
        s->ahead = ahead;
        for (long behind = 2; behind >= 1; behind--)
            if (index + behind < p->count && s[behind].reads.fetch) s->soon = index + behind;
    }
    return p->failed ? -1 : p->count;
}

void program_run(const program *p) {
    if (p->threads > 1 && get_team(p->threads)) {
        for (int i = 0; i < p->threads; i++) atomic_store_explicit(&places[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&done, 0, memory_order_relaxed);
        run_with_team(take_steps, p, p->threads);
        return;
    }
    for (const step *s = p->steps; s < p->steps + p->count; s++)
        for (long piece = 0; piece < s->pieces; piece++) s->work(s->arguments, piece);
}

void program_free(program *p) {
    for (long index = 0; index < p->count; index++) free(p->steps[index].arguments);
    free(p->steps);
    free(p);
}
#endif
