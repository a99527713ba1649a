// Threads that share a piece of work: those that are awake take part, and one that has not begun is not waited for.
#pragma once
#include <stddef.h>

// Called for 0 .. pieces by up to `threads` threads, until all is done. A thread's pieces lie side by side, one call after the other, until it helps
// others out.
typedef void (*piece_of_work)(const void *arguments, long piece);

// The memory that a piece will read, for a waiting thread to fetch before: from i * bytes_of_piece behind `begin` on, and behind `second` where there are two
// such places; or, where memory lies in no such order, what `fetch` finds, a part per call. It returns 0 behind the last one.
typedef struct {
    const char *begin, *second;
    long bytes_of_piece;
    int (*fetch)(const void *arguments, long piece, long part);
} reading;

// `arguments` are copied while a program is recorded (program.h), which will read again what they point to.
#define share(work, arguments, pieces, threads) share_reading(work, arguments, sizeof *(arguments), (reading){0}, pieces, threads)

void share_reading(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces, int threads);

#define MOST_THREADS 256

// The team for one job; 0: another thread of this process has it.
int get_team(int threads);

// part(what, id) on this thread with id 0, and with others below `threads` on those that come before it returns; then the team is free again.
typedef void (*part_of_job)(const void *what, int id);

void run_with_team(part_of_job part, const void *what, int threads);

// Between two looks at what another thread will change; `look` counts them. After many looks the thread yields the core.
void wait_a_little(int look);
