/* Sixteen float32 at a time, and what the encoder does with them: once in plain C, once in AVX-512,
 * bit for bit the same.
 *
 * Equal bits need equal steps: every product that is added is one fma, sums over lanes go through
 * the same tree, and the compiler joins no operations by itself (-ffp-contract=off). A pair of
 * bfloat16 products is added as VDPBF16PS does it, the odd one first, each with one rounding (Intel
 * SDM vol. 2C; compared over 3.2 million random pairs on an AMD Zen 5). Denormals alone differ:
 * that instruction takes them for zero. */

#ifndef ENCODER_VECTORS_H
#define ENCODER_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(ENCODER_EMULATE_TILES)
#define ENCODER_X86 1
/* GCC 12 finds values that its own intrinsics leave open on purpose (its bug 105593) */
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#define ENCODER_INLINE inline __attribute__((always_inline))

enum { LANES = 16, PANEL = 32 }; /* of a vector; columns of a panel of weights */

typedef uint16_t bf16;

static ENCODER_INLINE float to_float(uint32_t upper) {
    float value;
    memcpy(&value, &upper, 4);
    return value;
}

/* To the nearest bfloat16, ties to even; NaN stays NaN. As VCVTNEPS2BF16, but for denormals. */
static ENCODER_INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace plain_vectors {

struct Vector {
    float lane[LANES];
};

#define EACH_LANE for (int i = 0; i < LANES; i++)

static ENCODER_INLINE Vector load(const float *from) {
    Vector r;
    memcpy(r.lane, from, sizeof r.lane);
    return r;
}
static ENCODER_INLINE void store(float *to, const Vector &a) { memcpy(to, a.lane, sizeof a.lane); }
static ENCODER_INLINE Vector all(float value) {
    Vector r;
    EACH_LANE r.lane[i] = value;
    return r;
}
static ENCODER_INLINE Vector add(const Vector &a, const Vector &b) {
    Vector r;
    EACH_LANE r.lane[i] = a.lane[i] + b.lane[i];
    return r;
}
static ENCODER_INLINE Vector sub(const Vector &a, const Vector &b) {
    Vector r;
    EACH_LANE r.lane[i] = a.lane[i] - b.lane[i];
    return r;
}
static ENCODER_INLINE Vector mul(const Vector &a, const Vector &b) {
    Vector r;
    EACH_LANE r.lane[i] = a.lane[i] * b.lane[i];
    return r;
}
/* a * b + c, one rounding */
static ENCODER_INLINE Vector fma(const Vector &a, const Vector &b, const Vector &c) {
    Vector r;
    EACH_LANE r.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return r;
}
/* the second, where one is NaN or both are zeros, as MINPS and MAXPS */
static ENCODER_INLINE Vector least(const Vector &a, const Vector &b) {
    Vector r;
    EACH_LANE r.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
}
static ENCODER_INLINE Vector most(const Vector &a, const Vector &b) {
    Vector r;
    EACH_LANE r.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
}
static ENCODER_INLINE Vector nearest(const Vector &a) {
    Vector r;
    EACH_LANE r.lane[i] = nearbyintf(a.lane[i]);
    return r;
}
/* a * 2^n */
static ENCODER_INLINE Vector scaled(const Vector &a, const Vector &n) {
    Vector r;
    EACH_LANE r.lane[i] = n.lane[i] == n.lane[i] ? ldexpf(a.lane[i], (int)n.lane[i]) : n.lane[i];
    return r;
}
/* the first lanes as they are, the others `other` */
static ENCODER_INLINE Vector first_lanes(const Vector &a, int count, float other) {
    Vector r;
    EACH_LANE r.lane[i] = i < count ? a.lane[i] : other;
    return r;
}
static ENCODER_INLINE float sum(const Vector &a) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; i++) half[i] = a.lane[i] + a.lane[i + 8];
    for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
static ENCODER_INLINE float largest(const Vector &a) {
    float r = a.lane[0];
    for (int i = 1; i < LANES; i++) r = a.lane[i] > r ? a.lane[i] : r;
    return r;
}
static ENCODER_INLINE void store_bf16(bf16 *to, const Vector &low, const Vector &high) {
    for (int i = 0; i < LANES; i++) {
        to[i] = to_bf16(low.lane[i]);
        to[i + LANES] = to_bf16(high.lane[i]);
    }
}
/* sum[i] += the odd, then the even product of the pair and of lane i's pair in `weights` */
static ENCODER_INLINE Vector add_products(const Vector &sum, uint32_t pair, const bf16 *weights) {
    Vector r;
    EACH_LANE {
        float odd = fmaf(to_float(pair & 0xffff0000u), to_float((uint32_t)weights[2 * i + 1] << 16),
                         sum.lane[i]);
        r.lane[i] = fmaf(to_float(pair << 16), to_float((uint32_t)weights[2 * i] << 16), odd);
    }
    return r;
}
/* sixteen pairs of each of sixteen rows, of which `count` are there, as half a panel's columns */
static ENCODER_INLINE void transpose(const bf16 *rows, size_t row_size, int count, bf16 *columns) {
    for (int row = 0; row < LANES; row++)
        for (int i = 0; i < PANEL; i++)
            columns[i / 2 * 2 * PANEL + 2 * row + i % 2] =
                row < count ? rows[row * row_size + i] : 0;
}
/* thirty-two columns of two rows, so that each column's two are one word */
static ENCODER_INLINE void interleave(const bf16 *even, const bf16 *odd, bf16 *pairs) {
    for (int i = 0; i < PANEL; i++) {
        pairs[2 * i] = even ? even[i] : 0;
        pairs[2 * i + 1] = odd ? odd[i] : 0;
    }
}
static ENCODER_INLINE void fetch_ahead(const void *) {}

#undef EACH_LANE

} // namespace plain_vectors

#ifdef ENCODER_X86

/* Functions between these two are compiled for more than every x86-64 has; only after asking the
 * CPU are they called. */
#if defined(__clang__)
#define ENCODER_WIDE_BEGIN                                                                         \
    _Pragma("clang attribute "                                                                     \
            "push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16\"))), "    \
            "apply_to = function)")
#define ENCODER_TILES_BEGIN                                                                        \
    _Pragma("clang attribute "                                                                     \
            "push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile," \
            "amx-bf16\"))), apply_to = function)")
#define ENCODER_END _Pragma("clang attribute pop")
#else
#define ENCODER_WIDE_BEGIN                                                                         \
    _Pragma("GCC push_options")                                                                    \
        _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16\")")
#define ENCODER_TILES_BEGIN                                                                        \
    _Pragma("GCC push_options")                                                                    \
        _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16\")")
#define ENCODER_END _Pragma("GCC pop_options")
#endif

ENCODER_WIDE_BEGIN

namespace wide_vectors {

typedef __m512 Vector;

static ENCODER_INLINE Vector load(const float *from) { return _mm512_loadu_ps(from); }
static ENCODER_INLINE void store(float *to, Vector a) { _mm512_storeu_ps(to, a); }
static ENCODER_INLINE Vector all(float value) { return _mm512_set1_ps(value); }
static ENCODER_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
static ENCODER_INLINE Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
static ENCODER_INLINE Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
static ENCODER_INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static ENCODER_INLINE Vector least(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static ENCODER_INLINE Vector most(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static ENCODER_INLINE Vector nearest(Vector a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static ENCODER_INLINE Vector scaled(Vector a, Vector n) { return _mm512_scalef_ps(a, n); }
static ENCODER_INLINE Vector first_lanes(Vector a, int count, float other) {
    __mmask16 kept = count >= LANES ? 0xffff : (__mmask16)((1u << (count < 0 ? 0 : count)) - 1);
    return _mm512_mask_blend_ps(kept, _mm512_set1_ps(other), a);
}
static ENCODER_INLINE float sum(Vector a) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m128 eighth = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(eighth, _mm_shuffle_ps(eighth, eighth, 1)));
}
static ENCODER_INLINE float largest(Vector a) { return _mm512_reduce_max_ps(a); }
static ENCODER_INLINE void store_bf16(bf16 *to, Vector low, Vector high) {
    __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to, &both, sizeof both);
}
static ENCODER_INLINE Vector add_products(Vector sum, uint32_t pair, const bf16 *weights) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)pair),
                            (__m512bh)_mm512_loadu_si512(weights));
}
static ENCODER_INLINE void transpose(const bf16 *rows, size_t row_size, int count, bf16 *columns) {
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++)
        a[i] = i < count ? _mm512_loadu_si512(rows + (size_t)i * row_size) : _mm512_setzero_si512();
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4 g + c] has, in its quarter q, column 4 q + c of rows 4 g to 4 g + 3 */
    for (int c = 0; c < 4; c++) {
        __m512i low02 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88),
                low13 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i high02 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88),
                high13 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(columns + c * 2 * PANEL, _mm512_shuffle_i32x4(low02, high02, 0x88));
        _mm512_storeu_si512(columns + (4 + c) * 2 * PANEL,
                            _mm512_shuffle_i32x4(low13, high13, 0x88));
        _mm512_storeu_si512(columns + (8 + c) * 2 * PANEL,
                            _mm512_shuffle_i32x4(low02, high02, 0xdd));
        _mm512_storeu_si512(columns + (12 + c) * 2 * PANEL,
                            _mm512_shuffle_i32x4(low13, high13, 0xdd));
    }
}
static ENCODER_INLINE void interleave(const bf16 *even, const bf16 *odd, bf16 *pairs) {
    __m512i a = even ? _mm512_loadu_si512(even) : _mm512_setzero_si512(),
            b = odd ? _mm512_loadu_si512(odd) : _mm512_setzero_si512();
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                   7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(pairs + PANEL, _mm512_permutex2var_epi16(
                                           a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b));
}
static ENCODER_INLINE void fetch_ahead(const void *at) {
    _mm_prefetch((const char *)at, _MM_HINT_T1);
}

} // namespace wide_vectors

ENCODER_END

#endif
#endif
