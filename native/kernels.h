// The arithmetic of the delta path: y = A x and out += B y, weights in f16, sums in f32.
//
// Every (row, rank) product and every output element is summed in an order that depends on the matrix
// alone: not on how many rows share a call, nor on how the work is split between threads. That is what
// keeps a request's result bit-identical whatever else runs in its batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loraproxy {

struct Kernels {
    const char * name;

    // y[t * y_stride + r] = sum_k a[r * lda + k] * x[t][k]   for t < n_rows, r0 <= r < r1
    // a: f16, rows of n_in values, lda apart. x: n_rows pointers to n_in floats.
    void (*down)(const uint16_t * a, size_t lda, int n_in, const float * const * x, int n_rows, int r0, int r1,
                 float * y, size_t y_stride);

    // out[t][j] += sum_r y[t * y_stride + r] * bt[r * ldb + j]   for t < n_rows, j0 <= j < j1
    // bt: f16, B transposed: rank rows of n_out values, ldb apart. out: n_rows pointers to n_out floats.
    void (*up)(const uint16_t * bt, size_t ldb, int rank, const float * y, size_t y_stride, float * const * out,
               int n_rows, int j0, int j1);
};

// The best implementation for the processor this runs on; `force` ("avx512", "avx2", "neon", "plain") asks
// for a particular one and yields nullptr where the processor or this build lacks it.
const Kernels * choose_kernels(const char * force = nullptr);

float    f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);

} // namespace loraproxy
