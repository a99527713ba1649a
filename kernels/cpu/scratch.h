// Scratch memory of the calling thread, kept until it ends: to get 5 MB of pages anew takes the system longer than to pack a prompt there.
#pragma once
#include <stddef.h>

// `size` bytes from a cache line's beginning, whatever they hold, until the thread asks again; NULL without memory.
void *scratch_of(size_t size);
