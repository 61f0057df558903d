// The kernels' one text, compiled once for each instruction set. The including file defines, in its own
// namespace: LANES, vec (LANES floats), zero(), load(const float *), load(const uint16_t *) of f16, load(const int8_t *),
// store(), store_f16(), broadcast(), madd(a, b, c) = a * b + c, mul(), add(), reduce(vec), and ROWS, how many rows share one
// reading of the weights in registers. Weight is uint16_t (f16) or int8_t.

// One group of RANKS ranks for T rows. Each sum has one accumulator, so T changes no bit of it.
template <int T, class Weight>
static inline void down_group(const Weight * a, int n_in, const float * const * x, float * y, size_t y_stride) {
    vec acc[T][RANKS];
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < RANKS; ++r) {
            acc[t][r] = zero();
        }
    }
    int k = 0;
    for (; k + DEPTH <= n_in; k += DEPTH, a += RANKS * DEPTH) {
        for (int v = 0; v < DEPTH; v += LANES) {
            vec xs[T];
            for (int t = 0; t < T; ++t) {
                xs[t] = load(x[t] + k + v);
            }
            for (int r = 0; r < RANKS; ++r) {
                const vec w = load(a + r * DEPTH + v);
                for (int t = 0; t < T; ++t) {
                    acc[t][r] = madd(w, xs[t], acc[t][r]);
                }
            }
        }
    }
    if (k < n_in) { // the last tile is padded with zeros, and so must x be
        for (int t = 0; t < T; ++t) {
            float padded[DEPTH] = {};
            for (int i = k; i < n_in; ++i) {
                padded[i - k] = x[t][i];
            }
            for (int v = 0; v < DEPTH; v += LANES) {
                const vec xs = load(padded + v);
                for (int r = 0; r < RANKS; ++r) {
                    acc[t][r] = madd(load(a + r * DEPTH + v), xs, acc[t][r]);
                }
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < RANKS; ++r) {
            y[t * y_stride + r] = reduce(acc[t][r]);
        }
    }
}

template <class Weight>
static void down(const Weight * a, int n_in, const float * const * x, int n_rows, int g0, int g1, float * y,
                 size_t y_stride) {
    const size_t group = blocks_of(n_in, DEPTH) * RANKS * DEPTH;
    for (int g = g0; g < g1; ++g) {
        int t = 0;
        for (; t + ROWS <= n_rows; t += ROWS) {
            down_group<ROWS>(a + g * group, n_in, x + t, y + t * y_stride + g * RANKS, y_stride);
        }
        for (; t < n_rows; ++t) {
            down_group<1>(a + g * group, n_in, x + t, y + t * y_stride + g * RANKS, y_stride);
        }
    }
}

// One block of columns for T rows; `n` columns of it exist.
template <int T, class Weight>
static inline void up_block(const Weight * bt, int rank, int n, const float * y, size_t y_stride,
                            float * const * out, int j) {
    constexpr int V = COLUMNS / LANES;
    vec           acc[T][V];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            acc[t][v] = zero();
        }
    }
    for (int r = 0; r < rank; ++r, bt += COLUMNS) {
        vec s[T];
        for (int t = 0; t < T; ++t) {
            s[t] = broadcast(y[t * y_stride + r]);
        }
        for (int v = 0; v < V; ++v) {
            const vec w = load(bt + v * LANES);
            for (int t = 0; t < T; ++t) {
                acc[t][v] = madd(w, s[t], acc[t][v]);
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        float * o = out[t] + j;
        if (n == COLUMNS) {
            for (int v = 0; v < V; ++v) {
                store(o + v * LANES, add(load(o + v * LANES), acc[t][v]));
            }
        } else {
            float sums[COLUMNS];
            for (int v = 0; v < V; ++v) {
                store(sums + v * LANES, acc[t][v]);
            }
            for (int i = 0; i < n; ++i) {
                o[i] += sums[i];
            }
        }
    }
}

template <class Weight>
static void up(const Weight * bt, int rank, int n_out, const float * y, size_t y_stride, float * const * out,
               int n_rows, int b0, int b1) {
    for (int b = b0; b < b1; ++b) {
        const int        j     = b * COLUMNS;
        const int        n     = n_out - j < COLUMNS ? n_out - j : COLUMNS;
        const Weight *   block = bt + static_cast<size_t>(b) * rank * COLUMNS;
        int              t     = 0;
        for (; t + ROWS <= n_rows; t += ROWS) {
            up_block<ROWS>(block, rank, n, y + t * y_stride, y_stride, out + t, j);
        }
        for (; t < n_rows; ++t) {
            up_block<1>(block, rank, n, y + t * y_stride, y_stride, out + t, j);
        }
    }
}

static void narrow(const float * from, size_t n, float factor, uint16_t * to) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store_f16(to + i, mul(load(from + i), broadcast(factor)));
    }
    for (; i < n; ++i) {
        to[i] = f32_to_f16(from[i] * factor);
    }
}

static void round(const float * from, size_t n, float factor, int8_t * to) {
    // adding 1.5 * 2^23 leaves the nearest integer, ties to even, in a float's low bits
    constexpr float MAGIC = 12582912.0f;
    size_t          i     = 0;
    for (; i + LANES <= n; i += LANES) {
        float shifted[LANES];
        store(shifted, madd(load(from + i), broadcast(factor), broadcast(MAGIC)));
        for (int j = 0; j < LANES; ++j) {
            int32_t bits;
            std::memcpy(&bits, shifted + j, sizeof bits);
            to[i + j] = static_cast<int8_t>(bits);
        }
    }
    for (; i < n; ++i) {
        to[i] = static_cast<int8_t>(std::nearbyint(from[i] * factor));
    }
}
