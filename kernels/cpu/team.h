// Threads that share a piece of work: whoever is there takes part, and nobody is waited for who has not begun.
#pragma once

// Calls work(arguments, begin, end) until 0 .. pieces are covered, by up to `threads` threads, and returns when all is done. A thread's pieces lie side
// by side, one call after the other, until it helps others out.
typedef void (*piece_of_work)(const void *arguments, long piece);

void share(piece_of_work work, const void *arguments, long pieces, int threads);
