/* The encoder's layers, over the vectors of the namespace that this is included in: once for plain
 * C, once for AVX-512, once for AMX.
 *
 * BERT (Devlin et al. 2018, after Vaswani et al. 2017): word and place, LayerNorm; then in each
 * layer x = LayerNorm(x + attention(x)), x = LayerNorm(x + down(gelu(up(x)))). Texts lie end to
 * end, about ROWS_AT_ONCE tokens of them at a time, which go through all layers by one thread while
 * they are in its second cache; weights pass by once for each such chunk. Products are of bfloat16,
 * added up in float32; what is added to x, x itself and all statistics are float32. No include
 * guard: on purpose. */

/* ---- products: a [rows, 2 * pairs] times panels [columns / 32][pairs][32][2], each result handed
 * to done(row, column, low, high) */

#ifdef ENCODER_WITH_TILES

enum { BLOCK = 32, DEPTH = 16, QUERIES_AT_ONCE = 32 };

/* 2 × 2 tiles of 16 × 16 float32, from 2 × (16 rows, 32 deep) and 2 × (32 deep, 16 columns) of
 * bfloat16. Rows beyond `rows` are read, too. */
template <class Done>
static void block_product(const bf16 *a, size_t row_size, int rows, const bf16 *panel, int pairs,
                          int row, int column, const Done &done) {
    alignas(64) float results[BLOCK * PANEL];
    TILE_READS(a);
    TILE_READS(panel);
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (rows > 16) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int k = 0; k < pairs; k += 16) {
        const bf16 *weights = panel + (size_t)k * 2 * PANEL;
        TILE_LOAD(4, a + 2 * k, row_size * sizeof(bf16));
        TILE_LOAD(6, weights, 2 * PANEL * sizeof(bf16));
        TILE_LOAD(7, weights + PANEL, 2 * PANEL * sizeof(bf16));
        TILE_PRODUCT(0, 4, 6);
        TILE_PRODUCT(1, 4, 7);
        if (rows > 16) {
            TILE_LOAD(5, a + 16 * row_size + 2 * k, row_size * sizeof(bf16));
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
    }
    TILE_STORE(0, results, PANEL * sizeof(float));
    TILE_STORE(1, results + 16, PANEL * sizeof(float));
    if (rows > 16) {
        TILE_STORE(2, results + 16 * PANEL, PANEL * sizeof(float));
        TILE_STORE(3, results + 16 * PANEL + 16, PANEL * sizeof(float));
    }
    for (int r = 0; r < rows; r++)
        done(row + r, column, load(results + r * PANEL), load(results + r * PANEL + LANES));
}

#else

enum { BLOCK = ENCODER_BLOCK, DEPTH = 1, QUERIES_AT_ONCE = 24 };

/* 12 × 2 sums in registers, 24 of 32: each pair of `a` is read for two products, each two vectors
 * of weights for 24 */
template <int ROWS, class Done>
static __attribute__((noinline)) void few_rows(const bf16 *a, size_t row_size, const bf16 *panel,
                                               int pairs, int row, int column, const Done &done) {
    Vector low[ROWS], high[ROWS];
    ENCODER_UNROLL
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = all(0);
    for (int k = 0; k < pairs; k++, panel += 2 * PANEL) {
        ENCODER_UNROLL
        for (int r = 0; r < ROWS; r++) {
            uint32_t pair;
            memcpy(&pair, a + r * row_size + 2 * (size_t)k, 4);
            low[r] = add_products(low[r], pair, panel);
            high[r] = add_products(high[r], pair, panel + PANEL);
        }
    }
    ENCODER_UNROLL
    for (int r = 0; r < ROWS; r++) done(row + r, column, low[r], high[r]);
}

template <int ROWS = BLOCK, class Done>
static ENCODER_INLINE void block_product(const bf16 *a, size_t row_size, int rows,
                                         const bf16 *panel, int pairs, int row, int column,
                                         const Done &done) {
    if (rows >= ROWS) few_rows<ROWS>(a, row_size, panel, pairs, row, column, done);
    else if constexpr (ROWS > 1)
        block_product<ROWS - 1>(a, row_size, rows, panel, pairs, row, column, done);
}

#endif

template <class Done>
static __attribute__((noinline)) void product(const bf16 *a, size_t row_size, int rows,
                                              const bf16 *panels, size_t panel_size, int pairs,
                                              int columns, const Done &done) {
    int blocks = (rows + BLOCK - 1) / BLOCK;
    size_t share = (size_t)pairs * 2 * PANEL / blocks + 1;
    for (int column = 0; column < columns; column += PANEL, panels += panel_size) {
        for (int row = 0; row < rows; row += BLOCK) {
            /* the next panel on its way from the third cache while this one is at work */
            if (column + PANEL < columns)
                for (size_t at = 0; at < share; at += 32)
                    fetch_ahead(panels + panel_size + (size_t)(row / BLOCK) * share + at);
            block_product(a + (size_t)row * row_size, row_size,
                          rows - row < BLOCK ? rows - row : BLOCK, panels, pairs, row, column,
                          done);
        }
    }
}

/* ---- what becomes of a product's results, 32 columns of one row at a time */

/* x Φ(x), Φ's distance from ½ by an odd polynomial up to |x| = 4.25, where it is made to be ½.
 * Minimax of the result's error, by linear programming: at most 9e-5 (bfloat16 is 2e-4 apart at
 * 0.1). What is left of Φ(-4.25), 1.6e-7, is not multiplied by more than that. */
static ENCODER_INLINE Vector gelu(Vector x) {
    x = most(all(-4.25f), x);
    Vector u = least(x, all(4.25f)), t = mul(u, u), p = all(-8.460244727004351e-10f);
    p = fma(p, t, all(7.570719873228882e-08f));
    p = fma(p, t, all(-2.9387711037998088e-06f));
    p = fma(p, t, all(6.55266412650235e-05f));
    p = fma(p, t, all(-0.0009404440643265843f));
    p = fma(p, t, all(0.009257808327674866f));
    p = fma(p, t, all(-0.06545346975326538f));
    p = fma(p, t, all(0.3984200358390808f));
    return mul(x, fma(u, p, all(0.5f)));
}

struct Biased { /* + bias, as bfloat16 */
    const float *bias;
    bf16 *to;
    size_t row_size;
    ENCODER_INLINE void operator()(int row, int column, Vector low, Vector high) const {
        store_bf16(to + (size_t)row * row_size + column, add(low, load(bias + column)),
                   add(high, load(bias + column + LANES)));
    }
};

struct Activated { /* gelu(+ bias), as bfloat16 */
    const float *bias;
    bf16 *to;
    size_t row_size;
    ENCODER_INLINE void operator()(int row, int column, Vector low, Vector high) const {
        store_bf16(to + (size_t)row * row_size + column, gelu(add(low, load(bias + column))),
                   gelu(add(high, load(bias + column + LANES))));
    }
};

struct Added { /* + bias where there is one, to what is there */
    const float *bias;
    float *to;
    size_t row_size;
    ENCODER_INLINE void operator()(int row, int column, Vector low, Vector high) const {
        float *at = to + (size_t)row * row_size + column;
        if (bias) {
            low = add(low, load(bias + column));
            high = add(high, load(bias + column + LANES));
        }
        store(at, add(load(at), low));
        store(at + LANES, add(load(at + LANES), high));
    }
};

struct Scored { /* as they are; beyond the text's end they are nothing */
    int length;
    float *to;
    size_t row_size;
    ENCODER_INLINE void operator()(int row, int column, Vector low, Vector high) const {
        if (column + PANEL > length) {
            low = first_lanes(low, length - column, -1e30f);
            high = first_lanes(high, length - column - LANES, -1e30f);
        }
        store(to + (size_t)row * row_size + column, low);
        store(to + (size_t)row * row_size + column + LANES, high);
    }
};

struct Weighed { /* times a number of the row's own, as bfloat16 */
    const float *factor;
    bf16 *to;
    size_t row_size;
    ENCODER_INLINE void operator()(int row, int column, Vector low, Vector high) const {
        Vector by = all(factor[row]);
        store_bf16(to + (size_t)row * row_size + column, mul(low, by), mul(high, by));
    }
};

/* ---- layers of a chunk */

/* x = LayerNorm(x) * gain + shift (Ba et al. 2016), and its rounded copy; mean and variance in two
 * passes, float32 */
static __attribute__((noinline)) void normalise(const Shape &shape, const Chunk &chunk,
                                                const float *gain, const float *shift) {
    int width = shape.width;
    for (int row = 0; row < chunk.rows; row++) {
        float *x = chunk.x + (size_t)row * width;
        Vector a = all(0), b = all(0);
        for (int i = 0; i < width; i += PANEL) {
            a = add(a, load(x + i));
            b = add(b, load(x + i + LANES));
        }
        Vector mean = all(sum(add(a, b)) / (float)width);
        a = b = all(0);
        for (int i = 0; i < width; i += PANEL) {
            Vector low = sub(load(x + i), mean), high = sub(load(x + i + LANES), mean);
            a = fma(low, low, a);
            b = fma(high, high, b);
        }
        Vector scale = all(1.0f / sqrtf(sum(add(a, b)) / (float)width + shape.epsilon));
        for (int i = 0; i < width; i += PANEL) {
            Vector low = fma(mul(sub(load(x + i), mean), scale), load(gain + i), load(shift + i));
            Vector high = fma(mul(sub(load(x + i + LANES), mean), scale), load(gain + i + LANES),
                              load(shift + i + LANES));
            store(x + i, low);
            store(x + i + LANES, high);
            store_bf16(chunk.x_rounded + (size_t)row * width + i, low, high);
        }
    }
}

/* 2^x for x ≤ 0, or what rounding left above it, from 2^-126 on: the nearest power, times a
 * polynomial (minimax by linear programming, 2.6e-6) of what is left, in [-½, ½]. NaN stays NaN. */
static ENCODER_INLINE Vector exp2_of(Vector x) {
    x = most(all(-126.0f), x);
    Vector whole = nearest(x), f = sub(x, whole), p = all(0.00957053154706955f);
    p = fma(p, f, all(0.05591866374015808f));
    p = fma(p, f, all(0.24024735391139984f));
    p = fma(p, f, all(0.6931216716766357f));
    p = fma(p, f, all(0.9999992847442627f));
    return scaled(p, whole);
}

/* Scores → weights, not yet divided by their sum: softmax(x / √size) with e^x = 2^(x log₂ e);
 * returns 1 / sum. */
static ENCODER_INLINE float softened(const float *scores, int tokens, float factor, bf16 *weights) {
    Vector a = all(-1e30f), b = a;
    for (int i = 0; i < tokens; i += PANEL) {
        a = most(a, load(scores + i));
        b = most(b, load(scores + i + LANES));
    }
    Vector by = all(factor), peak = all(-largest(most(a, b)) * factor);
    a = b = all(0);
    for (int i = 0; i < tokens; i += PANEL) {
        Vector low = exp2_of(fma(load(scores + i), by, peak)),
               high = exp2_of(fma(load(scores + i + LANES), by, peak));
        a = add(a, low);
        b = add(b, high);
        store_bf16(weights + i, low, high);
    }
    return 1.0f / sum(add(a, b));
}

/* One text's, from its first row on; tokens that fill up its last panel weigh nothing. */
static __attribute__((noinline)) void attend(const Shape &shape, const Chunk &chunk, int first,
                                             int length) {
    int size = shape.size, tokens = (length + PANEL - 1) / PANEL * PANEL;
    int pairs = (length + 2 * DEPTH - 1) / (2 * DEPTH) * DEPTH;
    size_t attended = (size_t)shape.attended(), row_size = 3 * attended;
    float factor = 1.44269504088896341f / sqrtf((float)size), inverse[QUERIES_AT_ONCE];
    for (int head = 0; head < shape.heads; head++) {
        const bf16 *queries = chunk.qkv + (size_t)first * row_size + (size_t)head * size;
        const bf16 *keys = queries + attended, *values = keys + attended;
        for (int token = 0; token < tokens; token += LANES)
            for (int i = 0; i < size; i += PANEL) {
                bf16 *panel = chunk.keys + (size_t)(token / PANEL) * size * PANEL +
                              (size_t)i * PANEL + token % PANEL * 2;
                transpose(keys + (size_t)token * row_size + i, row_size, length - token, panel);
            }
        for (int token = 0; token < tokens; token += 2)
            for (int i = 0; i < size; i += PANEL) {
                const bf16 *value = values + (size_t)token * row_size + i;
                interleave(token < length ? value : nullptr,
                           token + 1 < length ? value + row_size : nullptr,
                           chunk.values + (size_t)i * tokens + (size_t)token * PANEL);
            }
        for (int query = 0; query < length; query += QUERIES_AT_ONCE) {
            int count = length - query < QUERIES_AT_ONCE ? length - query : QUERIES_AT_ONCE;
            product(queries + (size_t)query * row_size, row_size, count, chunk.keys,
                    (size_t)size * PANEL, size / 2, tokens,
                    Scored{length, chunk.scores, (size_t)tokens});
            for (int row = 0; row < count; row++)
                inverse[row] = softened(chunk.scores + (size_t)row * tokens, tokens, factor,
                                        chunk.weights + (size_t)row * tokens);
            bf16 *to = chunk.context + (size_t)(first + query) * attended + (size_t)head * size;
            product(chunk.weights, (size_t)tokens, count, chunk.values, (size_t)tokens * PANEL,
                    pairs, size, Weighed{inverse, to, attended});
        }
    }
}

/* All layers over the texts, whose words and places lie in chunk.x; starts [texts + 1] counts
 * tokens from the chunk's first. */
static void compute(const Shape &shape, const Weights &weights, const Chunk &chunk,
                    const int *starts, int texts) {
    size_t width = (size_t)shape.width, inner = (size_t)shape.inner,
           attended = (size_t)shape.attended();
    const float *vectors = weights.vectors;
    const bf16 *panels = weights.panels;
    TILES_BEGIN();
    normalise(shape, chunk, vectors, vectors + width);
    vectors += 2 * width;
    for (int layer = 0; layer < shape.layers; layer++) {
        product(chunk.x_rounded, width, chunk.rows, panels, width * PANEL, shape.width / 2,
                3 * shape.attended(), Biased{vectors, chunk.qkv, 3 * attended});
        panels += 3 * width * attended;
        vectors += 3 * attended;
        for (int text = 0; text < texts; text++)
            attend(shape, chunk, starts[text], starts[text + 1] - starts[text]);
        product(chunk.context, attended, chunk.rows, panels, attended * PANEL,
                shape.attended() / 2, shape.width, Added{vectors, chunk.x, width});
        panels += attended * width;
        normalise(shape, chunk, vectors + width, vectors + 2 * width);
        vectors += 3 * width;
        const bf16 *down = panels + width * inner;
        for (size_t first = 0; first < inner; first += INNER_AT_ONCE) {
            size_t some = inner - first < INNER_AT_ONCE ? inner - first : (size_t)INNER_AT_ONCE;
            product(chunk.x_rounded, width, chunk.rows, panels + first * width, width * PANEL,
                    shape.width / 2, (int)some, Activated{vectors + first, chunk.inner, some});
            product(chunk.inner, some, chunk.rows, down + first * PANEL, inner * PANEL,
                    (int)some / 2, shape.width,
                    Added{first ? nullptr : vectors + inner, chunk.x, width});
        }
        panels += 2 * width * inner;
        vectors += inner + width;
        normalise(shape, chunk, vectors, vectors + width);
        vectors += 2 * width;
    }
    TILES_END();
}

/* ---- texts, as many as fit into a chunk at a time */

/* A text's words and places, added up, as the rows of x from `row` on */
static void embed(const Shape &shape, const Weights &weights, const Chunk &chunk, int row,
                  const int64_t *ids, const int64_t *positions, int length) {
    for (int token = 0; token < length; token++) {
        const float *word = weights.words + (size_t)ids[token] * shape.width,
                    *place = weights.places + (size_t)positions[token] * shape.width;
        float *x = chunk.x + (size_t)(row + token) * shape.width;
        for (int i = 0; i < shape.width; i += LANES)
            store(x + i, add(load(word + i), load(place + i)));
    }
}

/* The last layer's x of all texts that are left in the queue; none is taken from it when there is
 * no memory for a chunk. */
static void encode(const Shape &shape, const Weights &weights, const Texts &texts, Queue &queue) {
    Room room;
    Chunk chunk;
    if (!room.divide(shape, texts.longest, chunk)) return;
    size_t width = (size_t)shape.width, first;
    while (int count = queue.take(first)) {
        int starts[ROWS_AT_ONCE + 1];
        chunk.rows = 0;
        for (int i = 0; i < count; i++) {
            size_t at = (first + i) * texts.row_size;
            int length = (int)texts.lengths[first + i];
            starts[i] = chunk.rows;
            embed(shape, weights, chunk, chunk.rows, texts.ids + at, texts.positions + at, length);
            chunk.rows += length;
        }
        starts[count] = chunk.rows;
        if (chunk.rows) compute(shape, weights, chunk, starts, count);
        for (int i = 0; i < count; i++)
            memcpy(texts.out + (first + i) * texts.row_size * width,
                   chunk.x + (size_t)starts[i] * width,
                   (size_t)(starts[i + 1] - starts[i]) * width * sizeof(float));
    }
}
