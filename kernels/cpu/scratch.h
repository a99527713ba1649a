// Scratch memory of the calling thread, kept until the thread ends: the system takes longer to provide 5 MB of new pages than a prompt takes to be packed
// there.
#pragma once
#include <stddef.h>

// Returns `size` bytes with undefined contents, aligned to a cache line and valid until the thread's next call; NULL if there is no memory.
void *scratch_of(size_t size);
