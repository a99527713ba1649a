// Programs: steps of work that is shared among threads, recorded by `share` and replayed in one call.
#pragma once
#include "team.h"

typedef struct program program;

extern _Thread_local program *recorded;  // the program that this thread records, or NULL

void record_step(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces);

// Returns scratch memory for shared work: the thread's own (scratch.h) or, while a program is recorded, memory that the program keeps.
void *shared_scratch(size_t size);
