// The arithmetic of the delta path: y = A x and out += B y, weights in f16 or in 8 bits, sums in f32.
//
// Every y value and every output element is summed in an order that depends on the matrix alone: not on how
// many rows share a call, nor on how the work is split between threads. That is what keeps a request's result
// bit-identical whatever else runs in its batch.
//
// The layouts make each thread read one unbroken stream: memory bandwidth is what bounds a step of many
// adapters. Padding is zero.
//   A (rank, n_in):          tiles of RANKS x DEPTH values: [rank / RANKS][n_in / DEPTH][RANKS][DEPTH]
//   B transposed (rank, n_out): blocks of COLUMNS columns:  [n_out / COLUMNS][rank][COLUMNS]
// Weights of 8 bits have one factor for each rank of A and of B; y takes both, so that the kernels see integers only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loraproxy {

constexpr int RANKS   = 4;
constexpr int DEPTH   = 16;
constexpr int COLUMNS = 32;

constexpr size_t blocks_of(size_t n, size_t block) { return (n + block - 1) / block; }

struct Kernels {
    const char * name;

    // y[t * y_stride + r] = sum_k A[r][k] * x[t][k]   for t < n_rows and the ranks of the groups [g0, g1)
    // x: n_rows pointers to n_in floats. y_stride: a multiple of RANKS.
    void (*down)(const uint16_t * a, int n_in, const float * const * x, int n_rows, int g0, int g1, float * y,
                 size_t y_stride);

    // out[t][j] += sum_r y[t * y_stride + r] * B[j][r]   for t < n_rows and the columns of the blocks [b0, b1)
    // out: n_rows pointers to n_out floats.
    void (*up)(const uint16_t * bt, int rank, int n_out, const float * y, size_t y_stride, float * const * out,
               int n_rows, int b0, int b1);

    // the same with weights of 8 bits
    void (*down8)(const int8_t * a, int n_in, const float * const * x, int n_rows, int g0, int g1, float * y,
                  size_t y_stride);
    void (*up8)(const int8_t * bt, int rank, int n_out, const float * y, size_t y_stride, float * const * out,
                int n_rows, int b0, int b1);

    // to[i] = from[i] * factor in f16, rounded to nearest, ties to even
    void (*narrow)(const float * from, size_t n, float factor, uint16_t * to);

    // to[i] = the integer nearest to from[i] * factor, which lies in [-127, 127]
    void (*round)(const float * from, size_t n, float factor, int8_t * to);
};

// The best implementation for the processor this runs on; `force` ("avx512", "avx2", "neon", "plain") asks
// for a particular one and yields nullptr where the processor or this build lacks it.
const Kernels * choose_kernels(const char * force = nullptr);

float    f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);

} // namespace loraproxy
