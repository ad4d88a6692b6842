/* Tiles of Intel's AMX (Intel SDM vol. 1, chapter 18), and the layers over them. For tests, where
 * ENCODER_EMULATE_TILES is defined, what the instructions do is written out in C, so that the same
 * layers run on any machine (and AVX-512's are left out, to be compiled sooner). */

#if defined(ENCODER_EMULATE_TILES)

namespace tile_emulation {

/* Eight tiles of sixteen rows of 64 bytes, each thread its own */
static thread_local uint32_t words[8][16][16];

static void load(int tile, const void *from, size_t stride) {
    for (int row = 0; row < 16; row++)
        memcpy(words[tile][row], (const char *)from + row * stride, 64);
}
static void store(int tile, void *to, size_t stride) {
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, words[tile][row], 64);
}
static void zero(int tile) { memset(words[tile], 0, sizeof words[tile]); }

/* TDPBF16PS, but in the order of VDPBF16PS, so that all bits must come out as without tiles. The
 * instruction adds up even and odd products of a tile apart, and their sum to what is there: other
 * roundings of the same numbers. */
static void product(int sums, int left, int right) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            float sum = to_float(words[sums][row][column]);
            for (int k = 0; k < 16; k++) {
                uint32_t a = words[left][row][k], b = words[right][k][column];
                sum = fmaf(to_float(a & 0xffff0000u), to_float(b & 0xffff0000u), sum);
                sum = fmaf(to_float(a << 16), to_float(b << 16), sum);
            }
            memcpy(&words[sums][row][column], &sum, 4);
        }
}

} // namespace tile_emulation

#define TILE_LOAD(tile, from, stride) tile_emulation::load(tile, from, stride)
#define TILE_STORE(tile, to, stride) tile_emulation::store(tile, to, stride)
#define TILE_ZERO(tile) tile_emulation::zero(tile)
#define TILE_PRODUCT(sums, left, right) tile_emulation::product(sums, left, right)
#define TILE_READS(at) (void)(at)
#define TILES_BEGIN() memset(tile_emulation::words, 0xff, sizeof tile_emulation::words)
#define TILES_END()

namespace tiles {
using namespace plain_vectors;
#include "_encoder_layers.h"
} // namespace tiles

#else

ENCODER_TILES_BEGIN

namespace tiles {
using namespace wide_vectors;

/* GCC's intrinsics do not tell the compiler that a tile, or their configuration, is read from
 * memory (amxtileintrin.h of GCC 12: no such operand): what is to be read has to be written by
 * here. */
#define TILE_READS(at) __asm__ volatile("" ::"r"(at) : "memory")

/* All eight tiles sixteen rows of 64 bytes: palette 1 (Intel SDM vol. 1, 18.2) */
static ENCODER_INLINE void configure() {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
        config[16 + 2 * tile] = 64;
        config[48 + tile] = 16;
    }
    TILE_READS(config);
    _tile_loadconfig(config);
}

#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_PRODUCT(sums, left, right) _tile_dpbf16ps(sums, left, right)
#define TILES_BEGIN() configure()
#define TILES_END() _tile_release()

#include "_encoder_layers.h"
} // namespace tiles

ENCODER_END

#endif
