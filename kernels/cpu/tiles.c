// Requests the permission to use matrix tiles (tiles.h) from the system.
#include "tiles.h"

#ifdef MATRIX_TILES
#ifdef SOFTWARE_TILES
int has_tiles = 1;
__thread tile_of_software software_tiles[8];
#else
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023  // arch_prctl's ARCH_REQ_XCOMP_PERM
#define TILE_DATA 18               // the state of a thread that must be permitted

int has_tiles;

__attribute__((constructor)) static void ask(void) { has_tiles = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }
#endif
#endif
