// Steps that calls shared among threads, recorded once to be done again in one call: `share` records them here.
#pragma once
#include "team.h"

typedef struct program program;

extern _Thread_local program *recorded;  // by this thread now, or NULL

void record_step(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces);

// Scratch memory of the calling thread as scratch_of's (scratch.h) for work that is shared; where that is recorded, it stays the program's.
void *shared_scratch(size_t size);
