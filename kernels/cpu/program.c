// Records the shared work of a decode step, and replays all of it in one call.
//
// Without this, each operation wakes the team, waits for it, and returns to Python: some microseconds, two hundred times a token. Here threads stay
// together from the first step to the last. A step starts when all pieces of the previous one are done; a late thread finds its pieces done by others, as
// in team.c. A waiting thread fetches the memory that it reads next, so that memory is always busy.
//
// A replay runs the same steps with the same arguments, and reads the present contents of what they point to. The recorder keeps that memory in place.
#ifndef SCALAR_BF16  // compiled only once
#include "program.h"

#include "scratch.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CACHE_LINE 128
#define LINE 64                   // bytes of a cache line
#define MOST_AHEAD (384 << 10)    // most bytes that a thread fetches while it waits: they must stay in its second-level cache
#define LINES_PER_LOOK 8
#define PARTS_PER_PIECE 2

typedef struct {
    piece_of_work work;
    void *arguments;
    long pieces, end;  // end: number of the program's pieces up to the end of this step
    reading reads;
    long ahead;  // number of the next step, this one included, whose `reads.begin` is set; -1 if none
    long soon;   // number of the first of the next two steps that has `reads.fetch`; -1 if none
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

// The step to which a thread's pieces belong, and the next of these pieces, in one number. The first thread that reaches a step sets it to that step.
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t next;
} place;

static place places[MOST_THREADS];               // used by the program that has the team
static _Alignas(CACHE_LINE) atomic_long done;    // number of pieces that are done, over all steps

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
    for (block *b = *recorded->scratch; b; b = b->next)  // a block is free again when its step is done, so all programs of a workspace share it
        if (b->size >= size) return (char *)b + CACHE_LINE;
    block *b = aligned_alloc(CACHE_LINE, (size + 2 * CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!b) return NULL;
    *b = (block){*recorded->scratch, size};
    *recorded->scratch = b;
    return (char *)b + CACHE_LINE;
}

static long first_piece(const program *p, const step *s, int id) { return s->pieces * id / p->threads; }

// Returns the next piece of step `index` among those that thread `owner` takes first, or -1 if none is left.
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

// The bytes that a thread fetches while it waits: those of its pieces of the next step that reads a stream.
typedef struct {
    long step, at, end;  // at, end: offsets in the stream, in bytes
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

// Fetches the next parts of the memory that the thread's first piece of a step reads; returns the number of parts fetched so far.
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

// Starts to record the work that this thread shares, which is also computed. Returns NULL if there is no memory.
program *program_begin(block **scratch, int threads) {
    program *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    p->scratch = scratch;
    recorded = p;
    return p;
}

// Ends the recording; returns the number of steps, or -1 if there was not enough memory for all of them.
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
