/* A BERT encoder without padding, in bfloat16: what precompute/text/bert.py (there: what for,
 * and when) hands its arrays to.
 *
 * Only the buffer protocol is used. All sizes and ids come from outside and are checked before they
 * are followed; nobody writes to them meanwhile. The layers run without the GIL, and keep nothing
 * between calls: any number of threads may be in here at once. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include <exception>
#include <initializer_list>
#include <mutex>
#include <thread>

#include "_encoder_vectors.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "64-bit and little-endian, or the encoder stays torch's"
#endif

#if defined(ENCODER_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

/* As encoder.py has it: raised with every change of what they say to each other, so that one that
 * was built for another is not used. */
enum { VERSION = 2 };

/* Tokens that go through all layers together, if no text has more, and numbers of the inner layer:
 * with 384 numbers a token, what is computed of them stays in a second cache of 1 MB. */
enum { ROWS_AT_ONCE = 256, INNER_AT_ONCE = 512, MOST_QUERIES = 32 };

/* Of a text, of a layer, layers, and threads: so that sizes are far from overflowing */
enum { LONGEST = 1 << 15, WIDEST = 1 << 15, DEEPEST = 1 << 10, MOST_THREADS = 256 };

struct Shape {
    int layers, width, heads, size, inner;
    float epsilon;

    /* Numbers that all heads have together: the width, where none was taken out. */
    int attended() const { return heads * size; }
};

struct Weights {
    const float *words;  /* [words, width] */
    const float *places; /* [positions, width] */
    const float
        *vectors; /* gain and shift of the first LayerNorm; of each layer: biases of queries, keys
                     and values, of what follows attention, its LayerNorm's gain and shift, biases
                     up and down, the last LayerNorm's gain and shift */
    const bf16 *panels; /* of each layer, as panels of 32 columns: queries, keys and values; what
                           follows attention; up; down */
};

struct Texts {
    const int64_t *ids, *positions; /* [count, row_size] */
    const int64_t *lengths;         /* [count] */
    size_t count, row_size;
    int longest;
    float *out; /* [count, row_size, width] */
};

/* Texts that no thread has taken yet, by the chunk */
class Queue {
  public:
    Queue(const Texts &texts, size_t rows) : texts(texts), rows(rows) {}

    bool is_empty() const { return next == texts.count; }

    /* How many texts, from `first` on, are the caller's: at least one, and no more rows than a
     * chunk may have; 0 when none is left. */
    int take(size_t &first) {
        std::lock_guard<std::mutex> alone(lock);
        size_t sum = 0;
        int count = 0;
        for (first = next; next < texts.count && count < ROWS_AT_ONCE; next++, count++) {
            sum += (size_t)texts.lengths[next];
            if (count && sum > rows) break;
        }
        return count;
    }

  private:
    const Texts &texts;
    const size_t rows;
    size_t next = 0;
    std::mutex lock;
};

/* Texts end to end, and room for what is computed of them */
struct Chunk {
    int rows;
    float *x;        /* [rows, width] */
    bf16 *x_rounded; /* [rows, width] */
    bf16 *qkv;       /* [rows, 3 attended]: queries, keys, values */
    bf16 *context;   /* [rows, attended] */
    bf16 *inner;     /* [rows, INNER_AT_ONCE] */
    bf16 *keys;      /* of one text and head, as panels: [tokens / 32][size / 2][32][2] */
    bf16 *values;    /* likewise: [size / 32][tokens / 2][32][2] */
    float *scores;   /* [MOST_QUERIES, tokens] */
    bf16 *weights;   /* likewise */
};

/* One piece of memory for a chunk; tiles read rows beyond the last, at most 32, which must be
 * there, and be numbers. */
class Room {
  public:
    Room() : memory(nullptr) {}
    ~Room() { free(memory); }
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;

    bool divide(const Shape &shape, int longest, Chunk &chunk) {
        size_t rows = (size_t)(longest > ROWS_AT_ONCE ? longest : ROWS_AT_ONCE) + PANEL,
               width = (size_t)shape.width, size = (size_t)shape.size,
               attended = (size_t)shape.attended();
        size_t tokens = ((size_t)longest + PANEL - 1) / PANEL * PANEL;
        const size_t floats[] = {rows * width, MOST_QUERIES * tokens};
        const size_t halves[] = {rows * width,         rows * 3 * attended, rows * attended,
                                 rows * INNER_AT_ONCE, tokens * size,       tokens * size,
                                 MOST_QUERIES * tokens};
        size_t bytes = 64;
        for (size_t count : floats) bytes += rounded(count * sizeof(float));
        for (size_t count : halves) bytes += rounded(count * sizeof(bf16));
        memory = calloc(bytes, 1);
        if (!memory) return false;
        next = (char *)memory + (64 - (uintptr_t)memory % 64);
        float **const float_parts[] = {&chunk.x, &chunk.scores};
        bf16 **const half_parts[] = {&chunk.x_rounded, &chunk.qkv,    &chunk.context, &chunk.inner,
                                     &chunk.keys,      &chunk.values, &chunk.weights};
        for (int i = 0; i < 2; i++) *float_parts[i] = (float *)taken(floats[i] * sizeof(float));
        for (int i = 0; i < 7; i++) *half_parts[i] = (bf16 *)taken(halves[i] * sizeof(bf16));
        return true;
    }

  private:
    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
    void *taken(size_t bytes) {
        char *at = next;
        next += rounded(bytes);
        return at;
    }
    void *memory;
    char *next = nullptr;
};

} // namespace

/* ---- the same layers three times */

#define TILES_BEGIN()
#define TILES_END()

#define ENCODER_BLOCK 2
#define ENCODER_UNROLL
namespace plain {
using namespace plain_vectors;
#include "_encoder_layers.h"
} // namespace plain
#undef ENCODER_BLOCK
#undef ENCODER_UNROLL

#if defined(ENCODER_X86)
#define ENCODER_BLOCK 12
#if defined(__clang__)
#define ENCODER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ENCODER_UNROLL _Pragma("GCC unroll 16")
#endif
ENCODER_WIDE_BEGIN
namespace wide {
using namespace wide_vectors;
#include "_encoder_layers.h"
} // namespace wide
ENCODER_END
#endif

#undef TILES_BEGIN
#undef TILES_END

#if defined(ENCODER_EMULATE_TILES) || defined(ENCODER_X86)
#define ENCODER_WITH_TILES 1
#include "_encoder_tiles.h"
#endif

/* ---- what this CPU has */

namespace {

typedef void Encode(const Shape &, const Weights &, const Texts &, Queue &);

#if defined(ENCODER_X86)

struct Cpu {
    bool wide = false, tiles = false;

    Cpu() {
        unsigned a, b, c, d, more;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27) ||
            !__get_cpuid_count(7, 0, &a, &b, &c, &d))
            return;
        unsigned low, high, features = b, tile_features = d;
        /* what the operating system keeps of registers: XCR0 */
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if (!__get_cpuid_count(7, 1, &more, &b, &c, &d)) return;
        const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
        wide = (features & avx512) == avx512 && (more & 1u << 5) && (low & 0xe6) == 0xe6;
#if defined(__linux__)
        const unsigned amx = 1u << 22 | 1u << 24; /* BF16, TILE */
        /* Linux lends the tiles' registers to processes that ask: ARCH_REQ_XCOMP_PERM,
         * XFEATURE_XTILEDATA (Documentation/arch/x86/xstate.rst) */
        tiles = wide && (tile_features & amx) == amx && (low & 0x60000) == 0x60000 &&
                syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
        (void)tile_features;
#endif
    }
};

#endif

/* The layers by this name; none where the CPU lacks what they need. */
Encode *named(const char *name) {
    if (!strcmp(name, "plain")) return plain::encode;
#if defined(ENCODER_X86)
    static const Cpu cpu;
    if (!strcmp(name, "avx512") && cpu.wide) return wide::encode;
    if (!strcmp(name, "amx") && cpu.tiles) return tiles::encode;
#elif defined(ENCODER_EMULATE_TILES)
    if (!strcmp(name, "amx")) return tiles::encode;
#endif
    return nullptr;
}

/* ---- Python */

PyObject *kernels(PyObject *, PyObject *) {
    PyObject *names = PyList_New(0);
    for (const char *name : {"amx", "avx512", "plain"}) {
        if (!names || !named(name)) continue;
        PyObject *text = PyUnicode_FromString(name);
        if (!text || PyList_Append(names, text) < 0) Py_CLEAR(names);
        Py_XDECREF(text);
    }
    return names;
}

/* Buffers of one call, given back at its end */
struct Buffers {
    enum { WORDS, PLACES, VECTORS, PANELS, IDS, POSITIONS, LENGTHS, OUT, COUNT };
    Py_buffer views[COUNT];
    int held = 0;

    ~Buffers() {
        while (held) PyBuffer_Release(&views[--held]);
    }
    bool hold(PyObject *const objects[COUNT]) {
        for (; held < COUNT; held++)
            if (PyObject_GetBuffer(objects[held], &views[held],
                                   held == OUT ? PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS
                                               : PyBUF_C_CONTIGUOUS) < 0)
                return false;
        return true;
    }
    size_t bytes(int which) const { return (size_t)views[which].len; }
    template <class Item> Item *items(int which) const { return (Item *)views[which].buf; }
    template <class Item> bool aligned(int which) const {
        return (uintptr_t)views[which].buf % alignof(Item) == 0;
    }
};

bool refuse(bool wrong, const char *what) {
    if (wrong) PyErr_Format(PyExc_ValueError, "encode: %s", what);
    return wrong;
}

/* Whether all sizes belong together, and ids, positions and lengths are within what they count;
 * else ValueError. */
bool checked(const Shape &shape, const Buffers &given, Texts &texts) {
    bool sound = shape.layers > 0 && shape.layers <= DEEPEST && shape.width > 0 &&
                 shape.width <= WIDEST && shape.inner > 0 && shape.inner <= WIDEST;
    sound = sound && shape.heads > 0 && shape.heads <= WIDEST && shape.size > 0 &&
            shape.size <= WIDEST / shape.heads;
    if (refuse(!sound, "layers, width, heads, their size or inner out of bounds")) return false;
    if (refuse(shape.width % PANEL || shape.size % PANEL || shape.inner % PANEL,
               "the width, a head's and the inner one must be multiples of 32"))
        return false;
    size_t width = (size_t)shape.width, inner = (size_t)shape.inner, layers = (size_t)shape.layers,
           attended = (size_t)shape.attended(), row = width * sizeof(float);
    bool fits = given.bytes(Buffers::PANELS) ==
                    layers * width * (4 * attended + 2 * inner) * sizeof(bf16) &&
                given.bytes(Buffers::VECTORS) ==
                    (2 * width + layers * (6 * width + 3 * attended + inner)) * sizeof(float) &&
                given.bytes(Buffers::WORDS) % row == 0 && given.bytes(Buffers::PLACES) % row == 0;
    if (refuse(!fits, "weights are not of the sizes that the shape tells")) return false;
    texts.count = given.bytes(Buffers::LENGTHS) / sizeof(int64_t);
    size_t tokens = given.bytes(Buffers::IDS) / sizeof(int64_t);
    texts.row_size = texts.count ? tokens / texts.count : 0;
    fits = given.bytes(Buffers::LENGTHS) == texts.count * sizeof(int64_t) &&
           given.bytes(Buffers::IDS) == texts.count * texts.row_size * sizeof(int64_t) &&
           given.bytes(Buffers::POSITIONS) == given.bytes(Buffers::IDS) &&
           given.bytes(Buffers::OUT) / row == tokens && given.bytes(Buffers::OUT) % row == 0;
    if (refuse(!fits, "ids, positions, lengths and out are not of as many texts and tokens"))
        return false;
    if (refuse(texts.row_size > LONGEST, "more than 32,768 tokens in a text")) return false;
    texts.ids = given.items<const int64_t>(Buffers::IDS);
    texts.positions = given.items<const int64_t>(Buffers::POSITIONS);
    texts.lengths = given.items<const int64_t>(Buffers::LENGTHS);
    texts.out = given.items<float>(Buffers::OUT);
    if (refuse(
            !given.aligned<int64_t>(Buffers::IDS) || !given.aligned<int64_t>(Buffers::POSITIONS) ||
                !given.aligned<int64_t>(Buffers::LENGTHS) || !given.aligned<bf16>(Buffers::PANELS),
            "ids, positions, lengths and panels must be aligned"))
        return false;
    uint64_t words = given.bytes(Buffers::WORDS) / row, places = given.bytes(Buffers::PLACES) / row;
    texts.longest = 0;
    for (size_t text = 0; text < texts.count; text++) {
        if (refuse((uint64_t)texts.lengths[text] > texts.row_size,
                   "a length is negative, or beyond its row"))
            return false;
        for (size_t i = 0, at = text * texts.row_size; i < (size_t)texts.lengths[text]; i++, at++)
            if (refuse((uint64_t)texts.ids[at] >= words || (uint64_t)texts.positions[at] >= places,
                       "an id or a position is in no table"))
                return false;
        if (texts.lengths[text] > texts.longest) texts.longest = (int)texts.lengths[text];
    }
    return true;
}

/* All texts, by as many threads or fewer, where the system lends no more, or has no memory for
 * their chunks; false when it has none for any. */
bool by_threads(Encode *layers, const Shape &shape, const Weights &weights, const Texts &texts,
                int threads) {
    size_t tokens = 0;
    for (size_t text = 0; text < texts.count; text++) tokens += (size_t)texts.lengths[text];
    size_t share = tokens / (size_t)threads + 1;
    Queue queue(texts, share < ROWS_AT_ONCE ? share : (size_t)ROWS_AT_ONCE);
    auto work = [&] { layers(shape, weights, texts, queue); };
    std::thread others[MOST_THREADS];
    int started = 0;
    try {
        for (; started + 1 < threads && (size_t)started + 1 < texts.count; started++)
            others[started] = std::thread(work);
    } catch (const std::exception &) {
        /* system_error, or bad_alloc: those there are do it */
    }
    work();
    for (int i = 0; i < started; i++) others[i].join();
    return queue.is_empty();
}

PyObject *encode(PyObject *, PyObject *arguments) {
    const char *name;
    int threads;
    Shape shape;
    PyObject *objects[Buffers::COUNT];
    if (!PyArg_ParseTuple(arguments, "si(iiiii)fOOOOOOOO:encode", &name, &threads, &shape.layers,
                          &shape.width, &shape.heads, &shape.size, &shape.inner, &shape.epsilon,
                          &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &objects[5], &objects[6], &objects[7]))
        return nullptr;
    if (refuse(threads < 1, "threads out of bounds")) return nullptr;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    Encode *layers = named(name);
    if (!layers)
        return PyErr_Format(PyExc_ValueError, "encode: no kernel %s on this machine", name);
    Buffers given;
    Texts texts;
    if (!given.hold(objects) || !checked(shape, given, texts)) return nullptr;
    Weights weights = {
        given.items<const float>(Buffers::WORDS), given.items<const float>(Buffers::PLACES),
        given.items<const float>(Buffers::VECTORS), given.items<const bf16>(Buffers::PANELS)};
    bool done;
    Py_BEGIN_ALLOW_THREADS;
    done = by_threads(layers, shape, weights, texts, threads);
    Py_END_ALLOW_THREADS;
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"kernels", kernels, METH_NOARGS,
     "Names of the kernels that this CPU can run, the quickest first."},
    {"encode", encode, METH_VARARGS,
     "encode(kernel, threads, (layers, width, heads, size, inner), epsilon, words, places, "
     "vectors, panels, ids, positions, lengths, out): hidden states of all texts."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_encoder",
                      "A BERT encoder without padding, in bfloat16.",
                      0,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

} // namespace

PyMODINIT_FUNC PyInit__encoder(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", VERSION) < 0) Py_CLEAR(made);
    return made;
}
