// The weights of the adapters that one target has met, stacked in the memory of the target's device.
#pragma once

#include "delta.h"

#include "ggml-cpp.h"

namespace loraproxy {

// Slot 0 is all zeros: the adapter of a row that has none. Ranks differ; all are padded with zeros to the largest.
class DeviceStack {
public:
    // What the products of the stacked matrices must be multiplied by, besides the pair's scale. Pairs hold f16 values
    // up to 2^15. A device may round activations to f16 and sum in f16, where such would overflow; so both matrices are
    // brought below 1 in here.
    static constexpr float SCALE = 0x1p+30f;

    DeviceStack(ggml_backend_t backend, const Target & target)
        : backend_(backend), op_(target.op), n_in_(target.n_in), n_out_(target.n_out) {}

    // Give every group's adapter a slot with its weights in it. Returns "" or what went wrong.
    std::string admit(const std::vector<Group> & groups);
    // Free the adapter's slot. What stays is uploaded anew when most of the memory would be kept for nobody.
    void forget(const AdapterWeights * owner);
    // 0 for an adapter that has none
    int slot_of(const AdapterWeights * owner) const;

    int64_t rank() const { return rank_; }
    // mul_mat: f16 (n_in, rank, slots); get_rows: f16 (rank, rows), row 0 all zeros
    ggml_tensor * a() const { return a_; }
    // f16 (rank, n_out, slots)
    ggml_tensor * b() const { return b_; }
    // Whether a view of one slot may be an operand.
    bool slots_are_aligned() const;
    // get_rows: the row of a() that is `slot`'s A x for `token`
    int32_t row_of(int slot, int32_t token) const;

private:
    struct Slot {
        const AdapterWeights * owner = nullptr;
        const Pair *           pair  = nullptr;
    };

    int         take_slot(const Group & group);
    std::string rebuild(int capacity, int rank);
    void        upload(int slot);
    void        clear();

    ggml_backend_t          backend_;
    Op                      op_;
    int64_t                 n_in_;
    int64_t                 n_out_;
    int                     rank_     = 0; // of the tensors
    int                     capacity_ = 0; // slots of the tensors, the zero slot included
    std::vector<Slot>       slots_    = std::vector<Slot>(1);
    ggml_context_ptr        tensors_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor *           a_ = nullptr;
    ggml_tensor *           b_ = nullptr;
};

} // namespace loraproxy
