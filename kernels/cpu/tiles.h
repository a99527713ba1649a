// Matrix tiles: eight registers of sixteen lines of 64 bytes, which AMX multiplies. They are computed in plain C if the library is built for that kind of
// CPU on another one (build.py).
//
// Written in assembly: the intrinsics of GCC 12 and 13 do not declare which memory a tile is loaded from, so the compiler may move an earlier store to
// that memory after the load.
#pragma once
#include "lanes.h"

#if PER_LANE == 2 && (defined(SOFTWARE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__)))
#define MATRIX_TILES 1
#define TILE_LINES 16
#define TILE_COLUMNS 32  // columns of bf16 in a line; a line of fp32 has LANES

// 1 if the system lets this process use tiles. It is asked once, when the library is loaded, for all threads and forked processes (tiles.c).
extern int has_tiles;

#ifdef SOFTWARE_TILES
typedef union {
    bf16 pairs[TILE_LINES][TILE_COLUMNS];
    float sums[TILE_LINES][LANES];
} tile_of_software;
extern __thread tile_of_software software_tiles[8];

INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#define clear_tile(t) memset(&software_tiles[t], 0, sizeof software_tiles[t])
#define load_tile(t, from, stride) copy_lines(&software_tiles[t], 64, from, stride)
#define store_tile(t, to, stride) copy_lines(to, stride, &software_tiles[t], 64)
#define multiply_tiles(t, a, b) multiply_in_software(&software_tiles[t], &software_tiles[a], &software_tiles[b])

INLINE void copy_lines(void *to, long to_stride, const void *from, long from_stride) {
    for (long i = 0; i < TILE_LINES; i++) memcpy((char *)to + i * to_stride, (const char *)from + i * from_stride, 64);
}

// sums[m][n] += line m of a times the pairs of b in lane n. Even and odd columns are summed separately, in order, and then added.
INLINE void multiply_in_software(tile_of_software *sum, const tile_of_software *a, const tile_of_software *b) {
    for (long m = 0; m < TILE_LINES; m++) {
        lanes even = all(0), odd = all(0);
        for (long k = 0; k < TILE_LINES; k++) {
            const lanes_u32 pairs = (lanes_u32)load_piece(b->pairs[k]);
            even += all(widen(a->pairs[m][2 * k])) * (lanes)(pairs << 16);
            odd += all(widen(a->pairs[m][2 * k + 1])) * (lanes)(pairs & 0xffff0000);
        }
        store_f32(sum->sums[m], load_f32(sum->sums[m]) + (even + odd));
    }
}
#else
// Sets the shape of the calling thread's eight tiles, which is undefined before. Products then use `bytes` bytes of each line of tiles 4 and 5, and one
// line of tiles 6 and 7 for every four of these bytes.
INLINE void shape_tiles(int bytes) {
    struct {
        uint8_t palette, start_line, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.line_bytes[t] = t / 2 == 2 ? bytes : 64, shape.lines[t] = t / 2 == 3 ? bytes / 4 : TILE_LINES;
    if (has_tiles) __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}

INLINE void begin_tiles(void) { shape_tiles(64); }

// Releases the tiles, so that the system need not save them when it interrupts this thread.
INLINE void end_tiles(void) {
    if (has_tiles) __asm__ volatile("tilerelease" ::: "memory");
}

#define clear_tile(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define load_tile(t, from, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((long)(stride)) : "memory")
#define store_tile(t, to, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define multiply_tiles(t, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #t ::: "memory")
#ifdef __AMX_INT8__
#define BYTE_TILES 1
// Multiplies the signed bytes of a with those of b, which are signed or unsigned.
#define multiply_byte_tiles(t, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #t ::: "memory")
#define multiply_with_unsigned_tiles(t, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #t ::: "memory")
#endif
#endif

// Sixteen rows that a tile loads, `stride` apart.
typedef struct {
    const bf16 *rows;
    long stride;
} band;

// sums [bands * 16][line] = or += a . b, for one or two bands of a [bands * 16][depth] and one or two vectors of b [depth / 2][line][2]; b has zeros after
// the depth. With two of both, each loaded tile is used twice. Sums stay in tiles.
INLINE void multiply_bands(const int bands, const int vectors, const band *a, const bf16 *b, long line, long depth, int goes_on, float *sums) {
    float *lower = sums + TILE_LINES * line;
    const long sums_stride = line * sizeof *sums, b_stride = line * 2 * sizeof *b;
    if (goes_on) {
        load_tile(0, sums, sums_stride);
        if (vectors > 1) load_tile(1, sums + LANES, sums_stride);
        if (bands > 1) load_tile(2, lower, sums_stride);
        if (bands > 1 && vectors > 1) load_tile(3, lower + LANES, sums_stride);
    } else {
        clear_tile(0);
        clear_tile(1);
        clear_tile(2);
        clear_tile(3);
    }
#define COLUMNS(first, first_stride, second, second_stride) \
    do { \
        load_tile(6, b + k * line, b_stride); \
        load_tile(4, first, (first_stride) * sizeof(bf16)); \
        multiply_tiles(0, 4, 6); \
        if (vectors > 1) load_tile(7, b + k * line + LANES * 2, b_stride); \
        if (vectors > 1) multiply_tiles(1, 4, 7); \
        if (bands > 1) load_tile(5, second, (second_stride) * sizeof(bf16)); \
        if (bands > 1) multiply_tiles(2, 5, 6); \
        if (bands > 1 && vectors > 1) multiply_tiles(3, 5, 7); \
    } while (0)
    long k = 0;
    for (; k + TILE_COLUMNS <= depth; k += TILE_COLUMNS) COLUMNS(a[0].rows + k, a[0].stride, a[1].rows + k, a[1].stride);
    if (k < depth) {  // values after a's last column may belong to another row or be undefined
        bf16 last[2 * TILE_LINES][TILE_COLUMNS] __attribute__((aligned(64)));
        memset(last, 0, sizeof last);
        for (int n = 0; n < bands * TILE_LINES; n++)
            memcpy(last[n], a[n / TILE_LINES].rows + n % TILE_LINES * a[n / TILE_LINES].stride + k, (depth - k) * sizeof(bf16));
        COLUMNS(last, TILE_COLUMNS, last + TILE_LINES, TILE_COLUMNS);
    }
#undef COLUMNS
    store_tile(0, sums, sums_stride);
    if (vectors > 1) store_tile(1, sums + LANES, sums_stride);
    if (bands > 1) store_tile(2, lower, sums_stride);
    if (bands > 1 && vectors > 1) store_tile(3, lower + LANES, sums_stride);
}
#else
#define has_tiles 0
INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#endif
