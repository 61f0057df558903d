// Products of the base model's quantised weights with the rows of a whole step.
//
// llama.cpp multiplies most block-quantised weights row by row: eight rows of a batch cost eight times one.
// Here eight rows of the weight are unpacked once and multiplied with every row of x while they are in registers.
// The weights stay where they are, mapped from the file and shared between processes.
//
// An output is summed over blocks of 32 inputs in their order, and a block's sum is one of integers: nothing
// depends on how many rows share the call, nor on the split between threads.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace loraproxy {

constexpr int BLOCK      = 32; // inputs that share a scale of x
constexpr int TILE_ROWS  = 8;  // outputs computed together
constexpr int BATCH_ROWS = 32; // rows of x multiplied with a tile while it is unpacked

// Rows of x in 8 bits: value = d * q, q in [-127, 127].
struct Activations {
    int                 n_rows = 0;
    int                 n_in   = 0;
    std::vector<int8_t> q; // (n_rows, n_in)
    std::vector<float>  d; // (n_in / BLOCK, n_rows)
    std::vector<float>  s; // (n_in / BLOCK, 2, n_rows): d * the sum of each half block's q

    void resize(int rows, int inputs);
};

struct BaseProduct {
    // Quantises row `row` of x, n_in floats, into `to`.
    void (*quantize)(const float * x, Activations & to, int row);

    // out[i][0 .. n_tile) = W x_i for the rows [first, first + n) of x, n <= BATCH_ROWS, and n_tile <= TILE_ROWS
    // rows of W, which begin at `w` and lie `row_bytes` apart.
    void (*product)(const uint8_t * w, size_t row_bytes, int n_tile, const Activations & x, int first, int n,
                    float * const * out);
};

// The product for weights of this type on this processor, or nullptr: llama.cpp's own is used then.
// `force` is as for choose_kernels.
const BaseProduct * choose_base_product(ggml_type type, int64_t n_in, const char * force = nullptr);

} // namespace loraproxy
