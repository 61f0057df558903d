// An adapter's weights in the kernels' layouts, in f16 or, where the base is quantised itself, in 8 bits.
#pragma once

#include "kernels.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace loraproxy {

// One adapter's pair for one target, as the kernels want it; it points into its adapter's memory.
struct Pair {
    int   rank  = 0;
    float scale = 1.0f;
    // f16
    const uint16_t * a  = nullptr; // tiled; for get_rows: A transposed, (n_vocab, rank)
    const uint16_t * bt = nullptr; // B transposed, in blocks of columns
    // or 8 bits: A = factor_a[r] * a8 and B = factor_b[r] * bt8
    const int8_t * a8      = nullptr;
    const int8_t * bt8     = nullptr;
    const float *  factors = nullptr; // (whole groups of ranks): factor_a[r] * factor_b[r]; nullptr: f16

    float a_value(size_t i) const { return a8 ? a8[i] : f16_to_f32(a[i]); }
    float bt_value(size_t i) const { return bt8 ? bt8[i] : f16_to_f32(bt[i]); }
    float factor(int r) const { return factors ? factors[r] : 1.0f; }
};

// All pairs of one adapter in one piece of memory, in the order in which the graph comes to them.
class AdapterWeights {
public:
    struct Part {
        int                  target = -1;
        int                  rank   = 0;
        float                scale  = 1.0f;
        std::vector<float>   factors; // empty: f16
        std::vector<uint8_t> a, bt;   // the values' bytes
    };

    AdapterWeights(size_t n_targets, std::vector<Part> parts);
    AdapterWeights(const AdapterWeights &) = delete;
    ~AdapterWeights();

    // nullptr where the adapter has no pair for this target
    const Pair * pair(int target) const { return pairs_[target].rank > 0 ? &pairs_[target] : nullptr; }
    size_t       n_targets() const { return pairs_.size(); }
    size_t       bytes() const { return bytes_; }

private:
    void      map(size_t size);
    uint8_t * put(uint8_t * at, const void * values, size_t n_bytes);

    std::vector<Pair> pairs_; // by target; rank 0: none
    void *            mapped_       = nullptr;
    size_t            mapped_bytes_ = 0;
    uint8_t *         memory_       = nullptr; // in it, on a boundary of huge pages
    size_t            bytes_        = 0;
};

enum class Form {
    f16,
    eight_bits, // f16 all the same where 8 bits would be too coarse
    by_token,   // f16, for get_rows
};

// A (rank, n_in) and B (n_out, rank), row-major and finite, in the layouts of kernels.h.
AdapterWeights::Part convert(const Kernels & kernels, const float * a, const float * b, size_t rank, size_t n_in, size_t n_out,
                             float scale, Form form);

} // namespace loraproxy
