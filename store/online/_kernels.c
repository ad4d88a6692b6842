/* Kernels in C: what store/online/kernels.py does in plain Python, over the same bytes, with the same
 * results; that file says what each does.
 *
 * Only the buffer protocol is used. Every size and position comes from outside, out of a file or an
 * array, and is checked before it is followed: nothing outside the buffers is read or written,
 * whatever they hold. Loops over many rows run without the GIL; nobody writes to what they read
 * meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "64-bit and little-endian, or the numpy kernels run"
#endif

#if defined(__x86_64__)
#define WITH_X86 1
#include <immintrin.h>
#endif

/* As kernels.py has it: raised with every change of what they say to each other, so that one that
 * was built for another is not used. */
enum { VERSION = 6 };

/* Strings fewer than this are done before another thread could have the GIL. */
enum { MANY = 32 };

static inline uint32_t load32(const uint8_t *from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

static inline uint64_t load64(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

/* ---- xxh3_64, seed 0 (xxhash_spec.md of the xxHash project, version 0.2.0) */

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u
#define PRIME_MX2 0x9FB21C651E98DF25u

enum { SECRET_BYTES = 192, STRIPE_BYTES = 64, BLOCK_STRIPES = 16 };

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t rotated(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

static inline uint64_t avalanche(uint64_t x) {
    x = (x ^ x >> 37) * PRIME_MX1;
    return x ^ x >> 32;
}

static inline uint64_t avalanche_xxh64(uint64_t x) {
    x = (x ^ x >> 33) * PRIME64_2;
    x = (x ^ x >> 29) * PRIME64_3;
    return x ^ x >> 32;
}

static inline uint64_t mixed(const uint8_t *data, size_t secret) {
    return folded_product(load64(data) ^ load64(SECRET + secret),
                          load64(data + 8) ^ load64(SECRET + secret + 8));
}

static uint64_t xxh3_to_16(const uint8_t *data, size_t size) {
    if (size > 8) {
        uint64_t low = load64(SECRET + 24) ^ load64(SECRET + 32) ^ load64(data);
        uint64_t high = load64(SECRET + 40) ^ load64(SECRET + 48) ^ load64(data + size - 8);
        return avalanche(size + __builtin_bswap64(low) + high + folded_product(low, high));
    }
    if (size >= 4) {
        uint64_t combined = load32(data + size - 4) | (uint64_t)load32(data) << 32;
        uint64_t x = load64(SECRET + 8) ^ load64(SECRET + 16) ^ combined;
        x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * PRIME_MX2;
        x = (x ^ ((x >> 35) + size)) * PRIME_MX2;
        return x ^ x >> 28;
    }
    if (size > 0) {
        uint32_t combined = data[size - 1] | (uint32_t)size << 8 | (uint32_t)data[0] << 16 |
                            (uint32_t)data[size >> 1] << 24;
        return avalanche_xxh64((load32(SECRET) ^ load32(SECRET + 4)) ^ (uint64_t)combined);
    }
    return avalanche_xxh64(load64(SECRET + 56) ^ load64(SECRET + 64));
}

static uint64_t xxh3_17_to_240(const uint8_t *data, size_t size) {
    uint64_t sum = size * PRIME64_1;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
            sum += mixed(data + 16 * i, 32 * i);
            sum += mixed(data + size - 16 * i - 16, 32 * i + 16);
        }
        return avalanche(sum);
    }
    for (size_t i = 0; i < 8; i++) sum += mixed(data + 16 * i, 16 * i);
    sum = avalanche(sum);
    for (size_t i = 8; i < size / 16; i++) sum += mixed(data + 16 * i, 16 * (i - 8) + 3);
    return avalanche(sum + mixed(data + size - 16, 119));
}

/* Longer inputs: eight sums over stripes of 64 bytes. Each kind does the same sums with wider
 * registers; `stripes` are those before the last 64 bytes, which may overlap them. */
typedef void (*Sums)(uint64_t sums[8], const uint8_t *data, size_t stripes, const uint8_t *last);

static inline void add_stripe(uint64_t sums[8], const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t word = load64(data + 8 * i) ^ load64(secret + 8 * i);
        sums[i] += load64(data + 8 * (i ^ 1)) + (word & 0xFFFFFFFF) * (word >> 32);
    }
}

static void sums_portable(uint64_t sums[8], const uint8_t *data, size_t stripes,
                          const uint8_t *last) {
    for (size_t n = 0; n < stripes; n++) {
        add_stripe(sums, data + STRIPE_BYTES * n, SECRET + 8 * (n % BLOCK_STRIPES));
        if (n % BLOCK_STRIPES == BLOCK_STRIPES - 1)
            for (int i = 0; i < 8; i++)
                sums[i] = (sums[i] ^ sums[i] >> 47 ^ load64(SECRET + SECRET_BYTES - 64 + 8 * i)) *
                          PRIME32_1;
    }
    add_stripe(sums, last, SECRET + SECRET_BYTES - 71);
}

#ifdef WITH_X86
__attribute__((target("avx2"))) static inline __m256i added_avx2(__m256i sum, const uint8_t *data,
                                                                 const uint8_t *secret) {
    __m256i stripe = _mm256_loadu_si256((const __m256i *)data);
    __m256i word = _mm256_xor_si256(stripe, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(word, _mm256_srli_epi64(word, 32));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(stripe, 0x4E)));
}

__attribute__((target("avx2"))) static inline __m256i scrambled_avx2(__m256i sum,
                                                                     const uint8_t *secret) {
    __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)),
                           _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), high);
}

__attribute__((target("avx2"))) static void sums_avx2(uint64_t sums[8], const uint8_t *data,
                                                      size_t stripes, const uint8_t *last) {
    __m256i low = _mm256_loadu_si256((__m256i *)sums),
            high = _mm256_loadu_si256((__m256i *)(sums + 4));
    for (size_t n = 0; n < stripes; n++) {
        const uint8_t *stripe = data + STRIPE_BYTES * n, *secret = SECRET + 8 * (n % BLOCK_STRIPES);
        low = added_avx2(low, stripe, secret);
        high = added_avx2(high, stripe + 32, secret + 32);
        if (n % BLOCK_STRIPES == BLOCK_STRIPES - 1) {
            low = scrambled_avx2(low, SECRET + SECRET_BYTES - 64);
            high = scrambled_avx2(high, SECRET + SECRET_BYTES - 32);
        }
    }
    low = added_avx2(low, last, SECRET + SECRET_BYTES - 71);
    high = added_avx2(high, last + 32, SECRET + SECRET_BYTES - 71 + 32);
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
}

__attribute__((target("avx512f"))) static inline __m512i
added_avx512(__m512i sum, const uint8_t *data, const uint8_t *secret) {
    __m512i stripe = _mm512_loadu_si512(data);
    __m512i word = _mm512_xor_si512(stripe, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(word, _mm512_srli_epi64(word, 32));
    return _mm512_add_epi64(
        sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(stripe, (_MM_PERM_ENUM)0x4E)));
}

__attribute__((target("avx512f"))) static void sums_avx512(uint64_t sums[8], const uint8_t *data,
                                                           size_t stripes, const uint8_t *last) {
    __m512i all = _mm512_loadu_si512(sums), prime = _mm512_set1_epi64(PRIME32_1);
    for (size_t n = 0; n < stripes; n++) {
        all = added_avx512(all, data + STRIPE_BYTES * n, SECRET + 8 * (n % BLOCK_STRIPES));
        if (n % BLOCK_STRIPES == BLOCK_STRIPES - 1) {
            all = _mm512_xor_si512(_mm512_xor_si512(all, _mm512_srli_epi64(all, 47)),
                                   _mm512_loadu_si512(SECRET + SECRET_BYTES - 64));
            __m512i high =
                _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(all, 32), prime), 32);
            all = _mm512_add_epi64(_mm512_mul_epu32(all, prime), high);
        }
    }
    all = added_avx512(all, last, SECRET + SECRET_BYTES - 71);
    _mm512_storeu_si512(sums, all);
}
#endif

static Sums sums_here = sums_portable;

static uint64_t xxh3_long(const uint8_t *data, size_t size) {
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                        PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    sums_here(sums, data, (size - 1) / STRIPE_BYTES, data + size - STRIPE_BYTES);
    uint64_t result = size * PRIME64_1;
    for (int i = 0; i < 4; i++)
        result += folded_product(sums[2 * i] ^ load64(SECRET + 11 + 16 * i),
                                 sums[2 * i + 1] ^ load64(SECRET + 19 + 16 * i));
    return avalanche(result);
}

static inline uint64_t xxh3(const uint8_t *data, size_t size) {
    return size > 240  ? xxh3_long(data, size)
           : size > 16 ? xxh3_17_to_240(data, size)
                       : xxh3_to_16(data, size);
}

/* ---- packed strings */

typedef struct {
    Py_buffer data, offsets;
    Py_ssize_t count;
} Strings;

static inline uint64_t offset_of(const Strings *strings, Py_ssize_t i) {
    return load64((const uint8_t *)strings->offsets.buf + 8 * i);
}

static inline const uint8_t *string_of(const Strings *strings, Py_ssize_t i, uint64_t *size) {
    uint64_t start = offset_of(strings, i);
    *size = offset_of(strings, i + 1) - start;
    return (const uint8_t *)strings->data.buf + start;
}

/* Whether the offsets ascend within the data; an exception otherwise. */
static int are_strings(Strings *strings) {
    strings->count = strings->offsets.len / 8 - 1;
    uint64_t before = 0;
    int ascend = strings->count >= 0 && strings->offsets.len % 8 == 0;
    for (Py_ssize_t i = 0; ascend && i <= strings->count; i++) {
        uint64_t offset = offset_of(strings, i);
        ascend = offset >= before;
        before = offset;
    }
    if (ascend && before <= (uint64_t)strings->data.len) return 1;
    PyErr_SetString(PyExc_ValueError, "offsets must ascend within the data");
    return 0;
}

/* Whether a buffer has as many items as there are strings; an exception otherwise. */
static int has_items(const Py_buffer *buffer, Py_ssize_t count, Py_ssize_t item_bytes) {
    if (buffer->len == count * item_bytes) return 1;
    PyErr_Format(PyExc_ValueError,
                 "an array of %zd items of %zd bytes is needed, and this one has %zd bytes", count,
                 item_bytes, buffer->len);
    return 0;
}

static void release(Py_buffer *first, Py_buffer *second, Py_buffer *third, Py_buffer *fourth,
                    Py_buffer *fifth) {
    Py_buffer *buffers[] = {first, second, third, fourth, fifth};
    for (int i = 0; i < 5; i++)
        if (buffers[i] != NULL) PyBuffer_Release(buffers[i]);
}

/* The GIL is given up for loops over many strings only: having it back can take 5 ms. */
static PyThreadState *let_go(Py_ssize_t count) {
    return count >= MANY ? PyEval_SaveThread() : NULL;
}

static void take_back(PyThreadState *state) {
    if (state != NULL) PyEval_RestoreThread(state);
}

static PyObject *hashes(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Strings strings;
    Py_ssize_t skip;
    Py_buffer out;
    if (!PyArg_ParseTuple(arguments, "y*y*nw*", &strings.data, &strings.offsets, &skip, &out))
        return NULL;
    int right = are_strings(&strings) && has_items(&out, strings.count, 8);
    if (right) {
        PyThreadState *state = let_go(strings.count);
        for (Py_ssize_t i = 0; i < strings.count; i++) {
            uint64_t size, skipped = skip > 0 ? (uint64_t)skip : 0;
            const uint8_t *string = string_of(&strings, i, &size);
            uint64_t hash =
                size > skipped ? xxh3(string + skipped, size - skipped) : xxh3(string, 0);
            memcpy((uint8_t *)out.buf + 8 * i, &hash, 8);
        }
        take_back(state);
    }
    release(&strings.data, &strings.offsets, &out, NULL, NULL);
    return right ? Py_NewRef(Py_None) : NULL;
}

/* (data, offsets int64, hashes uint64) of a sequence of bytes, each as bytes. */
static PyObject *pack(PyObject *Py_UNUSED(module), PyObject *sequence) {
    PyObject *strings = PySequence_Fast(sequence, "a sequence of bytes is needed");
    if (strings == NULL) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(strings), size = 0;
    PyObject *packed[3] = {NULL, PyBytes_FromStringAndSize(NULL, 8 * (count + 1)),
                           PyBytes_FromStringAndSize(NULL, 8 * count)};
    char *to = NULL;
    int right = packed[1] != NULL && packed[2] != NULL;
    for (Py_ssize_t i = 0; right && i <= count; i++) {
        memcpy(PyBytes_AsString(packed[1]) + 8 * i, &size, 8);
        if (i < count) {
            Py_ssize_t length = PyBytes_Size(PySequence_Fast_GET_ITEM(strings, i));
            right = length >= 0;
            size += length;
        }
    }
    if (right) packed[0] = PyBytes_FromStringAndSize(NULL, size);
    if (packed[0] != NULL) to = PyBytes_AsString(packed[0]);
    for (Py_ssize_t i = 0; to != NULL && i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(strings, i);
        Py_ssize_t length = PyBytes_Size(item);
        uint64_t hash = xxh3((uint8_t *)PyBytes_AsString(item), (size_t)length);
        memcpy(PyBytes_AsString(packed[2]) + 8 * i, &hash, 8);
        memcpy(to, PyBytes_AsString(item), (size_t)length);
        to += length;
    }
    PyObject *all = to != NULL ? PyTuple_Pack(3, packed[0], packed[1], packed[2]) : NULL;
    for (int i = 0; i < 3; i++) Py_XDECREF(packed[i]);
    Py_DECREF(strings);
    return all;
}

/* (data, offsets int64, hashes uint64, whether all are keys) of a sequence of str in UTF-8; a key
 * has 1 to `largest` bytes, none of them 0. */
static PyObject *pack_texts(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *sequence, *packed[3] = {NULL, NULL, NULL}, *all = NULL;
    Py_ssize_t largest, size = 0, length;
    if (!PyArg_ParseTuple(arguments, "On", &sequence, &largest)) return NULL;
    /* a tuple cannot become shorter meanwhile */
    PyObject *texts = PySequence_Tuple(sequence);
    if (texts == NULL) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(texts);
    packed[1] = PyBytes_FromStringAndSize(NULL, 8 * (count + 1));
    packed[2] = PyBytes_FromStringAndSize(NULL, 8 * count);
    int right = packed[1] != NULL && packed[2] != NULL, keys = 1;
    for (Py_ssize_t i = 0; right && i <= count; i++) {
        memcpy(PyBytes_AsString(packed[1]) + 8 * i, &size, 8);
        if (i < count) {
            /* of an ASCII text these are its own bytes */
            right = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(texts, i), &length) != NULL;
            size += right ? length : 0;
            keys &= right && length > 0 && length <= largest;
        }
    }
    if (right) packed[0] = PyBytes_FromStringAndSize(NULL, size);
    if (packed[0] != NULL) {
        char *to = PyBytes_AsString(packed[0]);
        for (Py_ssize_t i = 0; i < count; i++) {
            const char *text = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(texts, i), &length);
            uint64_t hash = xxh3((const uint8_t *)text, (size_t)length);
            memcpy(PyBytes_AsString(packed[2]) + 8 * i, &hash, 8);
            memcpy(to, text, (size_t)length);
            to += length;
        }
        keys &= memchr(PyBytes_AsString(packed[0]), 0, (size_t)size) == NULL;
        all = PyTuple_Pack(4, packed[0], packed[1], packed[2], keys ? Py_True : Py_False);
    }
    for (int i = 0; i < 3; i++) Py_XDECREF(packed[i]);
    Py_DECREF(texts);
    return all;
}

enum { CHECKSUM_BYTES = 8, ROW_HEADER_BYTES = 24 };

static inline int is_vouched(const uint8_t *row, uint64_t size, uint64_t key_hash) {
    return size >= ROW_HEADER_BYTES &&
           load64(row) == (xxh3(row + CHECKSUM_BYTES, size - CHECKSUM_BYTES) ^ key_hash);
}

enum { ABSENT = 0, FOUND = 1, DAMAGED = 2, ANOTHERS = 3 };

/* What a row is expected to be. */
typedef struct {
    uint32_t tag;
    uint64_t fixed_bytes;
    int exact;
    Py_buffer snapshots;
} Expected;

static int worth(const Expected *expected, const uint8_t *row, uint64_t size, uint64_t key_hash) {
    if (size == 0) return ABSENT;
    if (!is_vouched(row, size, key_hash) || load32(row + 20) != expected->tag) return DAMAGED;
    int known = 0;
    for (Py_ssize_t i = 0; i < expected->snapshots.len / 4; i++)
        known |= load32(row + 16) == load32((const uint8_t *)expected->snapshots.buf + 4 * i);
    if (known && size == ROW_HEADER_BYTES) return ABSENT;
    return known &&
                   (expected->exact ? size == expected->fixed_bytes : size >= expected->fixed_bytes)
               ? FOUND
               : DAMAGED;
}

static PyObject *verified(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Strings rows;
    Expected expected;
    Py_buffer key_hashes, states, times;
    unsigned long long fixed_bytes;
    if (!PyArg_ParseTuple(arguments, "y*y*y*Iy*Kpw*w*", &rows.data, &rows.offsets, &key_hashes,
                          &expected.tag, &expected.snapshots, &fixed_bytes, &expected.exact,
                          &states, &times))
        return NULL;
    expected.fixed_bytes = fixed_bytes;
    int right = are_strings(&rows) && has_items(&key_hashes, rows.count, 8) &&
                has_items(&states, rows.count, 1) && has_items(&times, rows.count, 8);
    if (right) {
        PyThreadState *state = let_go(rows.count);
        for (Py_ssize_t i = 0; i < rows.count; i++) {
            uint64_t size;
            const uint8_t *row = string_of(&rows, i, &size);
            int found =
                worth(&expected, row, size, load64((const uint8_t *)key_hashes.buf + 8 * i));
            uint64_t computed_at = found == FOUND ? load64(row + 8) : 0;
            ((uint8_t *)states.buf)[i] = (uint8_t)found;
            memcpy((uint8_t *)times.buf + 8 * i, &computed_at, 8);
        }
        take_back(state);
    }
    PyBuffer_Release(&expected.snapshots);
    release(&rows.data, &rows.offsets, &key_hashes, &states, &times);
    return right ? Py_NewRef(Py_None) : NULL;
}

/* ---- rows on their way into a store */

static inline void copy_value(uint8_t *to, const uint8_t *from, uint64_t width) {
    switch (width) {
    case 1:
        *to = *from;
        return;
    case 4:
        memcpy(to, from, 4);
        return;
    case 8:
        memcpy(to, from, 8);
        return;
    default:
        memcpy(to, from, width);
    }
}

typedef struct {
    Py_buffer values;
    uint64_t width;
} Column;

/* Rows of one size, put together and vouched for while each is in the cache. Each column's values
 * lie one after the other, as many bytes each as `widths` says. */
static void put_together(const Column *columns, Py_ssize_t fields, const Py_buffer *key_hashes,
                         const Py_buffer *times, const Py_buffer *snapshots, uint32_t tag,
                         uint8_t *row, uint64_t row_bytes) {
    Py_ssize_t count = key_hashes->len / 8;
    for (Py_ssize_t i = 0; i < count; i++, row += row_bytes) {
        memcpy(row + 8, (const uint8_t *)times->buf + 8 * i, 8);
        memcpy(row + 16, (const uint8_t *)snapshots->buf + 4 * i, 4);
        memcpy(row + 20, &tag, 4);
        uint8_t *to = row + ROW_HEADER_BYTES;
        for (const Column *column = columns; column < columns + fields; to += column++->width)
            copy_value(to, (const uint8_t *)column->values.buf + column->width * (uint64_t)i,
                       column->width);
        uint64_t checksum = xxh3(row + CHECKSUM_BYTES, row_bytes - CHECKSUM_BYTES) ^
                            load64((const uint8_t *)key_hashes->buf + 8 * i);
        memcpy(row, &checksum, 8);
    }
}

static PyObject *assemble(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *given;
    Py_buffer key_hashes, times, snapshots, widths, out;
    unsigned tag;
    if (!PyArg_ParseTuple(arguments, "O!y*y*y*y*Iw*", &PyTuple_Type, &given, &widths, &key_hashes,
                          &times, &snapshots, &tag, &out))
        return NULL;
    Py_ssize_t fields = PyTuple_GET_SIZE(given), opened = 0, count = key_hashes.len / 8;
    int right = has_items(&key_hashes, count, 8) && has_items(&times, count, 8) &&
                has_items(&snapshots, count, 4) && has_items(&widths, fields, 8);
    uint64_t row_bytes = ROW_HEADER_BYTES,
             room = count > 0 ? (uint64_t)(out.len / count) : UINT32_MAX;
    Column *columns = PyMem_RawMalloc(((size_t)fields + 1) * sizeof(Column));
    if (columns == NULL) PyErr_NoMemory();
    while (right && columns != NULL && opened < fields) {
        Column *column = &columns[opened];
        column->width = load64((const uint8_t *)widths.buf + 8 * opened);
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(given, opened), &column->values, PyBUF_SIMPLE) < 0)
            break;
        opened++;
        right = column->width <= room && row_bytes <= room &&
                has_items(&column->values, count, (Py_ssize_t)column->width);
        row_bytes += column->width;
    }
    right = right && columns != NULL && opened == fields && row_bytes <= room &&
            has_items(&out, count, (Py_ssize_t)row_bytes);
    if (right) {
        PyThreadState *state = let_go(count);
        put_together(columns, fields, &key_hashes, &times, &snapshots, tag, out.buf, row_bytes);
        take_back(state);
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "columns and rows do not fit each other");
    while (opened > 0) PyBuffer_Release(&columns[--opened].values);
    PyMem_RawFree(columns);
    release(&key_hashes, &times, &snapshots, &widths, &out);
    return right ? Py_NewRef(Py_None) : NULL;
}

/* ---- records */

enum { HEAD_BYTES = 8 };

static inline uint64_t padded(uint64_t size) { return (size + 7) & ~(uint64_t)7; }

/* A string and zeros up to a multiple of 8 bytes; where the next one begins. */
static inline uint8_t *put(uint8_t *to, const uint8_t *string, uint64_t size) {
    memcpy(to, string, size);
    memset(to + size, 0, padded(size) - size);
    return to + padded(size);
}

static PyObject *lay_out(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Strings keys, rows;
    Py_buffer out;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*w*", &keys.data, &keys.offsets, &rows.data,
                          &rows.offsets, &out))
        return NULL;
    int right =
        are_strings(&keys) && are_strings(&rows) && has_items(&rows.offsets, keys.count + 1, 8);
    uint64_t needed = 0;
    for (Py_ssize_t i = 0; right && i < keys.count; i++) {
        uint64_t key_size, row_size;
        string_of(&keys, i, &key_size);
        string_of(&rows, i, &row_size);
        right = key_size <= UINT16_MAX && row_size <= UINT32_MAX;
        needed += HEAD_BYTES + padded(key_size) + padded(row_size);
    }
    if (right && needed == (uint64_t)out.len) {
        PyThreadState *state = let_go(keys.count);
        uint8_t *to = out.buf;
        for (Py_ssize_t i = 0; i < keys.count; i++) {
            uint64_t key_size, row_size;
            const uint8_t *key = string_of(&keys, i, &key_size),
                          *row = string_of(&rows, i, &row_size);
            uint64_t head = row_size | key_size << 32;
            to = put(to, (const uint8_t *)&head, HEAD_BYTES);
            to = put(to, key, key_size);
            to = put(to, row, row_size);
        }
        take_back(state);
    } else if (!PyErr_Occurred()) {
        right = 0;
        PyErr_SetString(PyExc_ValueError, "keys and rows do not fit their records");
    }
    release(&keys.data, &keys.offsets, &rows.data, &rows.offsets, &out);
    return right ? Py_NewRef(Py_None) : NULL;
}

/* ---- the index, and what it points to */

enum { LINE_BYTES = 64, LINE_SLOTS = 7, PROBED = 4, AHEAD = 3, AHEAD_BYTES = 2048 };

#define TAG 0xFFFFFFu
#define POSITION 0xFFFFFFFFFFu

static const uint64_t MIX[8] = {
    0x6A09E667F3BCC909u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
    0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u,
};

typedef struct {
    PyObject_HEAD Py_buffer mapping;
    const uint8_t *base;
    uint64_t records_start, records_end, index_start, home_lines, lines, record_bytes;
} Records;

typedef struct {
    const uint8_t *start;
    uint64_t size;
} Place;

static inline uint64_t home_of(const Records *records, uint64_t hash) {
    return (hash >> 32) * records->home_lines >> 32;
}

static inline const uint8_t *line_at(const Records *records, uint64_t number) {
    return records->base + records->index_start + LINE_BYTES * number;
}

static inline int is_inside(const Records *records, uint64_t at) {
    return at >= records->records_start && at + HEAD_BYTES <= records->records_end;
}

static int is_whole(const uint8_t *line, uint64_t number) {
    uint64_t sum = (number + 1) * MIX[LINE_SLOTS];
    for (int i = 0; i < LINE_SLOTS; i++) {
        uint64_t slot = load64(line + 8 * i);
        sum += (slot ^ slot >> 32) * MIX[i];
    }
    return sum == load64(line + 8 * LINE_SLOTS);
}

static int compared(const Records *records, uint64_t at, const uint8_t *key, uint64_t key_size,
                    uint64_t tag, Place *place) {
    if (!is_inside(records, at)) return DAMAGED;
    uint64_t head = load64(records->base + at), row_size = head & UINT32_MAX,
             stored_size = head >> 32 & UINT16_MAX;
    uint64_t start = at + HEAD_BYTES + padded(stored_size);
    if (row_size == 0 || start + row_size > records->records_end) return DAMAGED;
    const uint8_t *stored = records->base + at + HEAD_BYTES;
    if (stored_size == key_size && memcmp(stored, key, key_size) == 0) {
        *place = (Place){records->base + start, row_size};
        return FOUND;
    }
    uint64_t hash = xxh3(stored, stored_size);
    return (hash & TAG) == tag && is_vouched(records->base + start, row_size, hash) ? ANOTHERS
                                                                                    : DAMAGED;
}

static int search(const Records *records, const uint8_t *key, uint64_t key_size, uint64_t hash,
                  Place *place) {
    uint64_t tag = hash & TAG;
    *place = (Place){records->base, 0};
    for (uint64_t number = home_of(records, hash); number < records->lines; number++) {
        const uint8_t *line = line_at(records, number);
        int room = 0;
        for (int i = 0; i < LINE_SLOTS; i++) {
            uint64_t slot = load64(line + 8 * i);
            room |= slot == 0;
            if (slot == 0 || slot >> 40 != tag) continue;
            int verdict = compared(records, (slot & POSITION) * 8, key, key_size, tag, place);
            if (verdict != ANOTHERS) return verdict;
        }
        /* a row that is found vouches for itself; that there is none the line has to vouch for */
        if (!is_whole(line, number)) return DAMAGED;
        if (room) return ABSENT;
    }
    return DAMAGED;
}

static long disk_faults(void) {
    struct rusage usage;
#ifdef RUSAGE_THREAD
    getrusage(RUSAGE_THREAD, &usage);
#else
    getrusage(RUSAGE_SELF, &usage);
#endif
    return usage.ru_majflt;
}

/* Keys on their way through one table after the other: `left` are the numbers of those that no
 * table had so far. */
typedef struct {
    const Strings *keys;
    const uint8_t *hashes;
    uint8_t *states;
    Place *places;
    Py_ssize_t *left, left_count;
} Search;

static inline uint64_t hash_of(const Search *all, Py_ssize_t i) {
    return load64(all->hashes + 8 * i);
}

/* Ask for places all at once, if touching the first few shows that they are not in memory. */
static void await(const Records *records, const Search *all) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint8_t *end = records->base + records->mapping.len;
    long before = disk_faults();
    for (Py_ssize_t k = 0; k < all->left_count && k < PROBED; k++)
        (void)*(const volatile uint8_t *)all->places[all->left[k]].start;
    if (disk_faults() == before) return;
    for (Py_ssize_t k = PROBED; k < all->left_count; k++) {
        Place place = all->places[all->left[k]];
        const uint8_t *start =
            records->base + (uint64_t)(place.start - records->base) / page * page;
        uint64_t size = (uint64_t)(place.start - start) + place.size;
        madvise((void *)start, size < (uint64_t)(end - start) ? size : (uint64_t)(end - start),
                MADV_WILLNEED);
    }
}

/* Search one table for the keys that are left; those that it has nothing of stay left. */
static void locate(const Records *records, Search *all) {
    for (Py_ssize_t k = 0; k < all->left_count; k++) {
        const uint8_t *line = line_at(records, home_of(records, hash_of(all, all->left[k])));
        __builtin_prefetch(line);
        all->places[all->left[k]] = (Place){line, LINE_BYTES};
    }
    await(records, all);
    for (Py_ssize_t k = 0; k < all->left_count; k++) {
        Place *place = &all->places[all->left[k]];
        const uint8_t *line = place->start;
        for (int i = 0; i < LINE_SLOTS; i++) {
            uint64_t slot = load64(line + 8 * i), at = (slot & POSITION) * 8;
            if (slot >> 40 == (hash_of(all, all->left[k]) & TAG) && is_inside(records, at)) {
                __builtin_prefetch(records->base + at);
                *place = (Place){records->base + at, records->record_bytes};
                break;
            }
        }
    }
    await(records, all);
    Py_ssize_t left_count = 0;
    for (Py_ssize_t k = 0; k < all->left_count; k++) {
        Py_ssize_t i = all->left[k];
        uint64_t size;
        const uint8_t *key = string_of(all->keys, i, &size);
        all->states[i] = (uint8_t)search(records, key, size, hash_of(all, i), &all->places[i]);
        all->left[left_count] = i;
        left_count += all->states[i] == ABSENT;
    }
    all->left_count = left_count;
}

/* Where each row goes when they lie one after the other, uint64 [n + 1]; their size. */
static uint64_t sum_sizes(const Place *places, Py_ssize_t count, uint8_t *offsets) {
    uint64_t total = 0;
    memcpy(offsets, &total, 8);
    for (Py_ssize_t i = 0; i < count; i++) {
        total += places[i].size;
        memcpy(offsets + 8 * (i + 1), &total, 8);
    }
    return total;
}

/* A row lies on pages of its own, and waiting for them is most of the time: a fifth less so. */
static inline void prefetch(const Place *places, Py_ssize_t i, Py_ssize_t count) {
    const Place soon = i + AHEAD < count ? places[i + AHEAD] : (Place){NULL, 0};
    for (uint64_t at = 0; at < soon.size && at < AHEAD_BYTES; at += LINE_BYTES)
        __builtin_prefetch(soon.start + at);
}

static void gather(const Place *places, Py_ssize_t count, uint8_t *to) {
    for (Py_ssize_t i = 0; i < count; to += places[i++].size) {
        prefetch(places, i, count);
        memcpy(to, places[i].start, places[i].size);
    }
}

/* Search the tables one after the other, each for what those before have nothing of. */
static void locate_all(const Records *records, PyObject *below, Search *all) {
    for (Py_ssize_t i = 0; i < all->keys->count; i++) all->left[i] = i;
    all->left_count = all->keys->count;
    locate(records, all);
    for (Py_ssize_t i = 0; all->left_count > 0 && i < PyTuple_GET_SIZE(below); i++)
        locate((const Records *)PyTuple_GET_ITEM(below, i), all);
}

/* The rows of the first table that has something of each key: of `records`, then of those `below`.
 */
static PyObject *rows_of(const Records *records, PyObject *below, Search *all, uint8_t *offsets) {
    Py_ssize_t count = all->keys->count;
    PyThreadState *state = let_go(count);
    locate_all(records, below, all);
    uint64_t total = sum_sizes(all->places, count, offsets);
    take_back(state);
    PyObject *rows = total > PY_SSIZE_T_MAX ? PyErr_NoMemory()
                                            : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (rows != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AsString(rows);
        state = let_go(count);
        gather(all->places, count, to);
        take_back(state);
    }
    return rows;
}

/* Whether all are tables too; an exception otherwise. */
static int are_tables(const Records *records, PyObject *below) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(below); i++)
        if (Py_TYPE(PyTuple_GET_ITEM(below, i)) != Py_TYPE((PyObject *)records)) {
            PyErr_SetString(PyExc_TypeError, "tables of records are needed");
            return 0;
        }
    return 1;
}

static PyObject *records_read(Records *records, PyObject *arguments) {
    Strings keys;
    Py_buffer hashes, offsets, states;
    PyObject *below, *rows = NULL;
    if (!PyArg_ParseTuple(arguments, "O!y*y*y*w*w*", &PyTuple_Type, &below, &keys.data,
                          &keys.offsets, &hashes, &offsets, &states))
        return NULL;
    if (are_tables(records, below) && are_strings(&keys) && has_items(&hashes, keys.count, 8) &&
        has_items(&offsets, keys.count + 1, 8) && has_items(&states, keys.count, 1)) {
        size_t count = (size_t)keys.count + 1;
        Search all = {.keys = &keys, .hashes = hashes.buf, .states = states.buf};
        all.places = PyMem_RawMalloc(count * sizeof(Place));
        all.left = PyMem_RawMalloc(count * sizeof(Py_ssize_t));
        rows = all.places != NULL && all.left != NULL ? rows_of(records, below, &all, offsets.buf)
                                                      : PyErr_NoMemory();
        PyMem_RawFree(all.places);
        PyMem_RawFree(all.left);
    }
    release(&keys.data, &keys.offsets, &hashes, &offsets, &states);
    return rows;
}

/* ---- columns: rows that are whole, each field's values one after the other */

/* Where in a row each of them lies is pairs of uint64: where it begins, and its bytes. Of each
 * there is room in `out` for all rows' values, rounded up to whole lines. */
typedef struct {
    Expected expected;
    Py_buffer hashes, fields, out, states, times;
} Columns;

static inline uint64_t lines_of(uint64_t size) {
    return (size + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

/* Whether the fields lie within a row, and `out` has their size for so many rows; an exception
 * otherwise. */
static int fit(const Columns *columns, uint64_t count) {
    uint64_t fixed = columns->expected.fixed_bytes, left = (uint64_t)columns->out.len;
    int right = columns->fields.len % 16 == 0;
    for (const uint8_t *field = columns->fields.buf, *end = field + columns->fields.len;
         right && field < end; field += 16) {
        uint64_t offset = load64(field), width = load64(field + 8);
        right = offset <= fixed && width <= fixed - offset &&
                (width == 0 || count <= left / width) && lines_of(width * count) <= left;
        left -= right ? lines_of(width * count) : 0;
    }
    if (right && left == 0) return 1;
    PyErr_SetString(PyExc_ValueError,
                    "fields must lie within a row, and their columns fill the room for them");
    return 0;
}

/* One row's values, or zeros. */
static void put_values(const Columns *columns, const uint8_t *row, uint64_t count, uint64_t i) {
    uint8_t *to = columns->out.buf;
    for (const uint8_t *field = columns->fields.buf, *end = field + columns->fields.len;
         field < end; field += 16) {
        uint64_t width = load64(field + 8);
        if (row != NULL) copy_value(to + width * i, row + load64(field), width);
        else memset(to + width * i, 0, width);
        to += lines_of(width * count);
    }
}

/* Verify each row and copy its values while it is in the cache. States are what finding the rows
 * came to, and become what they are worth. */
static Py_ssize_t scatter(const Columns *columns, const Place *places, Py_ssize_t count) {
    Py_ssize_t whole = 0;
    uint8_t *states = columns->states.buf, *times = columns->times.buf;
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch(places, i, count);
        Place place = places[i];
        if (states[i] == FOUND)
            states[i] = (uint8_t)worth(&columns->expected, place.start, place.size,
                                       load64((const uint8_t *)columns->hashes.buf + 8 * i));
        const uint8_t *row = states[i] == FOUND ? place.start : NULL;
        uint64_t computed_at = row != NULL ? load64(row + 8) : 0;
        memcpy(times + 8 * i, &computed_at, 8);
        put_values(columns, row, (uint64_t)count, (uint64_t)i);
        whole += row != NULL;
    }
    return whole;
}

#define COLUMNS_FORMAT "y*Iy*Ky*w*w*w*"
#define COLUMNS_ARGUMENTS(c, fixed)                                                                \
    &(c).hashes, &(c).expected.tag, &(c).expected.snapshots, &(fixed), &(c).fields, &(c).out,      \
        &(c).states, &(c).times

static void release_columns(Columns *columns) {
    PyBuffer_Release(&columns->expected.snapshots);
    release(&columns->hashes, &columns->fields, &columns->out, &columns->states, &columns->times);
}

static int have_items(const Columns *columns, Py_ssize_t count) {
    return has_items(&columns->hashes, count, 8) && has_items(&columns->states, count, 1) &&
           has_items(&columns->times, count, 8) && fit(columns, (uint64_t)count);
}

static PyObject *columns_of_rows(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Strings rows;
    Columns columns = {.expected.exact = 1};
    unsigned long long fixed_bytes;
    PyObject *done = NULL;
    if (!PyArg_ParseTuple(arguments, "y*y*" COLUMNS_FORMAT, &rows.data, &rows.offsets,
                          COLUMNS_ARGUMENTS(columns, fixed_bytes)))
        return NULL;
    columns.expected.fixed_bytes = fixed_bytes;
    if (are_strings(&rows) && have_items(&columns, rows.count)) {
        Place *places = PyMem_RawMalloc(((size_t)rows.count + 1) * sizeof(Place));
        if (places != NULL) {
            PyThreadState *state = let_go(rows.count);
            memset(columns.states.buf, FOUND, (size_t)rows.count);
            for (Py_ssize_t i = 0; i < rows.count; i++)
                places[i].start = string_of(&rows, i, &places[i].size);
            Py_ssize_t whole = scatter(&columns, places, rows.count);
            take_back(state);
            done = PyLong_FromSsize_t(whole);
            PyMem_RawFree(places);
        } else PyErr_NoMemory();
    }
    release(&rows.data, &rows.offsets, NULL, NULL, NULL);
    release_columns(&columns);
    return done;
}

static PyObject *records_columns(Records *records, PyObject *arguments) {
    Strings keys;
    Columns columns = {.expected.exact = 1};
    unsigned long long fixed_bytes;
    PyObject *below, *done = NULL;
    if (!PyArg_ParseTuple(arguments, "O!y*y*" COLUMNS_FORMAT, &PyTuple_Type, &below, &keys.data,
                          &keys.offsets, COLUMNS_ARGUMENTS(columns, fixed_bytes)))
        return NULL;
    columns.expected.fixed_bytes = fixed_bytes;
    if (are_tables(records, below) && are_strings(&keys) && have_items(&columns, keys.count)) {
        size_t count = (size_t)keys.count + 1;
        Search all = {.keys = &keys, .hashes = columns.hashes.buf, .states = columns.states.buf};
        all.places = PyMem_RawMalloc(count * sizeof(Place));
        all.left = PyMem_RawMalloc(count * sizeof(Py_ssize_t));
        if (all.places != NULL && all.left != NULL) {
            PyThreadState *state = let_go(keys.count);
            locate_all(records, below, &all);
            Py_ssize_t whole = scatter(&columns, all.places, keys.count);
            take_back(state);
            done = PyLong_FromSsize_t(whole);
        } else PyErr_NoMemory();
        PyMem_RawFree(all.places);
        PyMem_RawFree(all.left);
    }
    release(&keys.data, &keys.offsets, NULL, NULL, NULL);
    release_columns(&columns);
    return done;
}

static PyObject *records_find(Records *records, PyObject *key) {
    char *data;
    Py_ssize_t size;
    Place place;
    if (PyBytes_AsStringAndSize(key, &data, &size) < 0) return NULL;
    int state = search(records, (uint8_t *)data, (uint64_t)size,
                       xxh3((uint8_t *)data, (size_t)size), &place);
    if (state == ABSENT) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)place.start, (Py_ssize_t)place.size);
}

static int is_layout(const Records *records) {
    uint64_t length = (uint64_t)records->mapping.len;
    return records->records_start <= records->records_end &&
           records->records_end <= records->index_start && records->index_start <= length &&
           records->lines <= (length - records->index_start) / LINE_BYTES &&
           records->home_lines > 0 && records->home_lines <= records->lines &&
           records->home_lines <= UINT32_MAX;
}

static PyObject *records_new(PyTypeObject *type, PyObject *arguments,
                             PyObject *Py_UNUSED(keywords)) {
    Records *records = (Records *)type->tp_alloc(type, 0);
    unsigned long long start, end, index, home_lines, lines, record_bytes;
    if (records == NULL) return NULL;
    if (!PyArg_ParseTuple(arguments, "y*KKKKKK", &records->mapping, &start, &end, &index,
                          &home_lines, &lines, &record_bytes)) {
        Py_DECREF(records);
        return NULL;
    }
    records->base = records->mapping.buf;
    records->records_start = start, records->records_end = end, records->index_start = index;
    records->home_lines = home_lines, records->lines = lines, records->record_bytes = record_bytes;
    if (!is_layout(records)) {
        PyErr_SetString(PyExc_ValueError, "records and index must lie in the mapping");
        Py_DECREF(records);
        return NULL;
    }
    return (PyObject *)records;
}

static void records_dealloc(Records *records) {
    PyTypeObject *type = Py_TYPE(records);
    PyBuffer_Release(&records->mapping);
    type->tp_free(records);
    Py_DECREF(type);
}

static PyMethodDef RECORDS_METHODS[] = {
    {"find", (PyCFunction)records_find, METH_O,
     "find(key) -> its row, empty where that cannot be told for damage, or None"},
    {"columns", (PyCFunction)records_columns, METH_VARARGS,
     "columns(below, keys, key_offsets, key_hashes, tag, snapshots, fixed_bytes, fields, out, "
     "states_out, times_out) -> rows that are whole"},
    {"read", (PyCFunction)records_read, METH_VARARGS,
     "read(below, keys, key_offsets, hashes, offsets_out, states_out) -> the rows"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot RECORDS_SLOTS[] = {
    {Py_tp_new, records_new},
    {Py_tp_dealloc, records_dealloc},
    {Py_tp_methods, RECORDS_METHODS},
    {0, NULL},
};

static PyType_Spec RECORDS_SPEC = {
    .name = "precompute.store.online._kernels.Records",
    .basicsize = sizeof(Records),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = RECORDS_SLOTS,
};

/* ---- files */

static PyObject *send(PyObject *Py_UNUSED(module), PyObject *arguments) {
    int file;
    long long start, size;
    if (!PyArg_ParseTuple(arguments, "iLL", &file, &start, &size)) return NULL;
#ifdef SYNC_FILE_RANGE_WRITE
    PyThreadState *state = PyEval_SaveThread();
    /* whatever goes wrong, the fsync at the end says so */
    (void)sync_file_range(file, start, size, SYNC_FILE_RANGE_WRITE);
    PyEval_RestoreThread(state);
#endif
    Py_RETURN_NONE;
}

/* ---- the module */

static const struct {
    const char *name;
    Sums sums;
} WIDTHS[] = {
#ifdef WITH_X86
    {"avx512f", sums_avx512},
    {"avx2", sums_avx2},
#endif
    {"portable", sums_portable},
};

static int is_here(const char *width) {
#ifdef WITH_X86
    __builtin_cpu_init();
    if (strcmp(width, "avx512f") == 0) return __builtin_cpu_supports("avx512f");
    if (strcmp(width, "avx2") == 0) return __builtin_cpu_supports("avx2");
#endif
    return strcmp(width, "portable") == 0;
}

static PyObject *widths(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing)) {
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names != NULL && i < sizeof(WIDTHS) / sizeof(WIDTHS[0]); i++) {
        PyObject *name =
            is_here(WIDTHS[i].name) ? PyUnicode_FromString(WIDTHS[i].name) : Py_NewRef(Py_None);
        if (name == NULL || (name != Py_None && PyList_Append(names, name) < 0)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *name) {
    const char *wanted = PyUnicode_AsUTF8(name);
    for (size_t i = 0; wanted != NULL && i < sizeof(WIDTHS) / sizeof(WIDTHS[0]); i++)
        if (strcmp(WIDTHS[i].name, wanted) == 0 && is_here(wanted)) {
            sums_here = WIDTHS[i].sums;
            Py_RETURN_NONE;
        }
    if (wanted != NULL) PyErr_Format(PyExc_ValueError, "this CPU has no %s", wanted);
    return NULL;
}

static int executed(PyObject *module) {
    for (size_t i = sizeof(WIDTHS) / sizeof(WIDTHS[0]); i-- > 0;)
        if (is_here(WIDTHS[i].name)) sums_here = WIDTHS[i].sums;
    PyObject *type = PyType_FromModuleAndSpec(module, &RECORDS_SPEC, NULL);
    int failed = PyModule_AddObjectRef(module, "Records", type);
    Py_XDECREF(type);
    return failed < 0 ? failed : PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyMethodDef METHODS[] = {
    {"hashes", hashes, METH_VARARGS, "hashes(data, offsets, skip, out)"},
    {"pack", pack, METH_O, "pack(strings) -> (data, offsets, hashes)"},
    {"pack_texts", pack_texts, METH_VARARGS,
     "pack_texts(texts, largest) -> (data, offsets, hashes, whether all are keys)"},
    {"verified", verified, METH_VARARGS,
     "verified(rows, offsets, key_hashes, tag, snapshots, fixed_bytes, exact, states_out, "
     "times_out)"},
    {"assemble", assemble, METH_VARARGS,
     "assemble(columns, widths, key_hashes, times, snapshots, tag, out): rows of one size"},
    {"columns", columns_of_rows, METH_VARARGS,
     "columns(rows, offsets, key_hashes, tag, snapshots, fixed_bytes, fields, out, states_out, "
     "times_out) -> rows that are whole"},
    {"lay_out", lay_out, METH_VARARGS, "lay_out(keys, key_offsets, rows, row_offsets, out)"},
    {"send", send, METH_VARARGS,
     "send(file, start, size): have it written to the disk from now on"},
    {"widths", widths, METH_NOARGS,
     "widths() -> the kinds of registers that this CPU has, widest first"},
    {"use", use, METH_O, "use(width): have xxh3 computed so; all of them give the same values"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, executed},
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "precompute.store.online._kernels",
    .m_doc = "Kernels in C: see store/online/kernels.py.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
