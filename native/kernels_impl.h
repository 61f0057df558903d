// The kernels' one text, compiled once for each instruction set. The including file defines, in its own
// namespace: LANES, vec (LANES floats), zero(), load(const float *), load_f16(const uint16_t *), store(),
// broadcast(), madd(a, b, c) = a * b + c, reduce(vec), and madd1() / widen1() for single values.

template <int R, int T>
static inline void down_tile(const uint16_t * a, size_t lda, int n_in, const float * const * x, float * y,
                             size_t y_stride) {
    vec acc[T][R];
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < R; ++r) {
            acc[t][r] = zero();
        }
    }
    int k = 0;
    for (; k + LANES <= n_in; k += LANES) {
        vec w[R];
        for (int r = 0; r < R; ++r) {
            w[r] = load_f16(a + r * lda + k);
        }
        for (int t = 0; t < T; ++t) {
            const vec v = load(x[t] + k);
            for (int r = 0; r < R; ++r) {
                acc[t][r] = madd(w[r], v, acc[t][r]);
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < R; ++r) {
            float tail = 0.0f;
            for (int i = k; i < n_in; ++i) {
                tail = madd1(widen1(a[r * lda + i]), x[t][i], tail);
            }
            y[t * y_stride + r] = reduce(acc[t][r]) + tail;
        }
    }
}

template <int T>
static inline void down_rows(const uint16_t * a, size_t lda, int n_in, const float * const * x, int r0, int r1,
                             float * y, size_t y_stride) {
    int r = r0;
    for (; r + DOWN_RANKS <= r1; r += DOWN_RANKS) {
        down_tile<DOWN_RANKS, T>(a + r * lda, lda, n_in, x, y + r, y_stride);
    }
    for (; r < r1; ++r) {
        down_tile<1, T>(a + r * lda, lda, n_in, x, y + r, y_stride);
    }
}

static void down(const uint16_t * a, size_t lda, int n_in, const float * const * x, int n_rows, int r0, int r1,
                 float * y, size_t y_stride) {
    int t = 0;
    for (; t + DOWN_ROWS <= n_rows; t += DOWN_ROWS) {
        down_rows<DOWN_ROWS>(a, lda, n_in, x + t, r0, r1, y + t * y_stride, y_stride);
    }
    for (; t < n_rows; ++t) {
        down_rows<1>(a, lda, n_in, x + t, r0, r1, y + t * y_stride, y_stride);
    }
}

template <int T, int V>
static inline void up_tile(const uint16_t * bt, size_t ldb, int rank, const float * y, size_t y_stride,
                           float * const * out, int j) {
    vec acc[T][V];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            acc[t][v] = zero();
        }
    }
    for (int r = 0; r < rank; ++r) {
        vec w[V];
        for (int v = 0; v < V; ++v) {
            w[v] = load_f16(bt + r * ldb + j + v * LANES);
        }
        for (int t = 0; t < T; ++t) {
            const vec s = broadcast(y[t * y_stride + r]);
            for (int v = 0; v < V; ++v) {
                acc[t][v] = madd(w[v], s, acc[t][v]);
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            float * o = out[t] + j + v * LANES;
            store(o, add(load(o), acc[t][v]));
        }
    }
}

template <int T, int V>
static inline void up_rows(const uint16_t * bt, size_t ldb, int rank, const float * y, size_t y_stride,
                           float * const * out, int j0, int j1) {
    int j = j0;
    for (; j + V * LANES <= j1; j += V * LANES) {
        up_tile<T, V>(bt, ldb, rank, y, y_stride, out, j);
    }
    for (; j + LANES <= j1; j += LANES) {
        up_tile<T, 1>(bt, ldb, rank, y, y_stride, out, j);
    }
    for (; j < j1; ++j) {
        for (int t = 0; t < T; ++t) {
            float sum = 0.0f;
            for (int r = 0; r < rank; ++r) {
                sum = madd1(widen1(bt[r * ldb + j]), y[t * y_stride + r], sum);
            }
            out[t][j] += sum;
        }
    }
}

static void up(const uint16_t * bt, size_t ldb, int rank, const float * y, size_t y_stride, float * const * out,
               int n_rows, int j0, int j1) {
    int t = 0;
    for (; t + UP_ROWS <= n_rows; t += UP_ROWS) {
        up_rows<UP_ROWS, 2>(bt, ldb, rank, y + t * y_stride, y_stride, out + t, j0, j1);
    }
    for (; t < n_rows; ++t) {
        up_rows<1, 4>(bt, ldb, rank, y + t * y_stride, y_stride, out + t, j0, j1);
    }
}
