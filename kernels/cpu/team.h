// Threads that share work: those that are awake take part, and the caller does not wait for one that has not started.
#pragma once
#include <stddef.h>

// A function that is called for pieces 0 .. pieces - 1, by up to `threads` threads. A thread first takes adjacent pieces in order, then helps others.
typedef void (*piece_of_work)(const void *arguments, long piece);

// The memory that a piece will read, so that a waiting thread can fetch it. Piece i starts i * bytes_of_piece after `begin` and, if not NULL, after
// `second`. For memory in another order, `fetch` fetches one part per call, and returns 0 after the last part.
typedef struct {
    const char *begin, *second;
    long bytes_of_piece;
    int (*fetch)(const void *arguments, long piece, long part);
} reading;

// `arguments` are copied while a program is recorded (program.h); a replay reads again the memory that they point to.
#define share(work, arguments, pieces, threads) share_reading(work, arguments, sizeof *(arguments), (reading){0}, pieces, threads)

void share_reading(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces, int threads);

#define MOST_THREADS 256

// Takes the team for one job. Returns 0 if another thread of this process has it.
int get_team(int threads);

// Calls part(what, id) on this thread with id 0, and on other threads with ids below `threads` if they join before it returns. Then the team is free
// again.
typedef void (*part_of_job)(const void *what, int id);

void run_with_team(part_of_job part, const void *what, int threads);

// Pauses between two polls of memory that another thread changes; `look` counts the polls. After many polls the thread yields the core.
void wait_a_little(int look);
