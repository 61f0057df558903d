#include "device_stack.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace loraproxy {

namespace {

constexpr float SHRINK        = 0x1p-15f;
constexpr int   RANK_MULTIPLE = 8; // vector loads and matrix units want rows of such lengths

uint16_t shrunk(float value) { return f32_to_f16(SHRINK * value); }

} // namespace

std::string DeviceStack::admit(const std::vector<Group> & groups) {
    try {
        std::vector<int> fresh;
        int              rank = rank_;
        for (const Group & group : groups) {
            rank = std::max(rank, group.pair->rank);
            if (slot_of(group.owner) == 0) {
                fresh.push_back(take_slot(group));
            }
        }
        const int n_slots = static_cast<int>(slots_.size());
        if (rank > rank_ || n_slots > capacity_) {
            return rebuild(n_slots > capacity_ ? std::max(n_slots, 2 * capacity_) : capacity_, rank);
        }
        for (const int slot : fresh) {
            upload(slot);
        }
        return "";
    } catch (...) {
        clear(); // a slot without its weights must not be taken for one
        throw;
    }
}

int DeviceStack::slot_of(const AdapterWeights * owner) const {
    for (size_t slot = 1; slot < slots_.size(); ++slot) {
        if (slots_[slot].owner == owner) {
            return static_cast<int>(slot);
        }
    }
    return 0;
}

bool DeviceStack::slots_are_aligned() const {
    const size_t alignment = ggml_backend_get_alignment(backend_);
    return b_->nb[2] % alignment == 0 && (op_ == Op::get_rows || a_->nb[2] % alignment == 0);
}

int32_t DeviceStack::row_of(int slot, int32_t token) const {
    const bool known = slot > 0 && token >= 0 && token < n_in_;
    return known ? static_cast<int32_t>(1 + (slot - 1) * n_in_ + token) : 0;
}

void DeviceStack::forget(const AdapterWeights * owner) {
    const int slot = slot_of(owner);
    if (slot == 0) {
        return;
    }
    slots_[slot]    = {};
    const auto used = std::count_if(slots_.begin(), slots_.end(), [](const Slot & s) { return s.owner != nullptr; });
    if (used == 0 || 4 * (used + 1) <= capacity_) {
        clear();
    }
}

int DeviceStack::take_slot(const Group & group) {
    size_t slot = 1;
    while (slot < slots_.size() && slots_[slot].owner != nullptr) {
        ++slot;
    }
    if (slot == slots_.size()) {
        slots_.emplace_back();
    }
    slots_[slot] = {group.owner, group.pair};
    return static_cast<int>(slot);
}

void DeviceStack::clear() {
    slots_.assign(1, Slot{});
    buffer_.reset();
    tensors_.reset();
    a_ = b_ = nullptr;
    rank_ = capacity_ = 0;
}

std::string DeviceStack::rebuild(int capacity, int rank) {
    const std::vector<Slot> slots = slots_;
    clear(); // before anything is allocated, so that the two never lie side by side
    const int64_t padded = (rank + RANK_MULTIPLE - 1) / RANK_MULTIPLE * RANK_MULTIPLE;
    const int64_t rows   = 1 + (capacity - 1) * n_in_; // of a get_rows target
    if (op_ == Op::get_rows && rows > std::numeric_limits<int32_t>::max()) {
        return "too many adapters for this vocabulary";
    }
    tensors_.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    a_ = op_ == Op::mul_mat ? ggml_new_tensor_3d(tensors_.get(), GGML_TYPE_F16, n_in_, padded, capacity)
                            : ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F16, padded, rows);
    b_ = ggml_new_tensor_3d(tensors_.get(), GGML_TYPE_F16, padded, n_out_, capacity);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(tensors_.get(), backend_));
    if (!buffer_) {
        const size_t bytes = ggml_nbytes(a_) + ggml_nbytes(b_);
        clear();
        return "the device has no " + std::to_string(bytes) + " bytes left for adapters";
    }
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer_.get(), 0);
    slots_    = slots;
    rank_     = static_cast<int>(padded);
    capacity_ = capacity;
    for (size_t slot = 1; slot < slots_.size(); ++slot) {
        if (slots_[slot].owner != nullptr) {
            upload(static_cast<int>(slot));
        }
    }
    return "";
}

void DeviceStack::upload(int slot) {
    const Pair &          pair = *slots_[slot].pair;
    std::vector<uint16_t> values(n_in_ * rank_);
    size_t                first = values.size() * slot;
    if (op_ == Op::mul_mat) {
        const size_t depths = blocks_of(n_in_, DEPTH);
        for (int r = 0; r < pair.rank; ++r) {
            for (int64_t k = 0; k < n_in_; ++k) { // out of the host kernels' tiles
                const size_t tile     = r / RANKS * depths + k / DEPTH;
                values[r * n_in_ + k] = shrunk(pair.a_value((tile * RANKS + r % RANKS) * DEPTH + k % DEPTH));
            }
        }
    } else {
        for (int64_t token = 0; token < n_in_; ++token) {
            const uint16_t * row = pair.a + token * pair.rank;
            std::transform(row, row + pair.rank, values.begin() + token * rank_, [](uint16_t h) { return shrunk(f16_to_f32(h)); });
        }
        first = static_cast<size_t>(row_of(slot, 0)) * rank_;
    }
    ggml_backend_tensor_set(a_, values.data(), first * sizeof(uint16_t), values.size() * sizeof(uint16_t));

    values.assign(n_out_ * rank_, 0);
    for (int64_t j = 0; j < n_out_; ++j) {
        const size_t block = j / COLUMNS * pair.rank * COLUMNS; // the host kernels' block of columns
        for (int r = 0; r < pair.rank; ++r) {
            values[j * rank_ + r] = shrunk(pair.factor(r) * pair.bt_value(block + r * COLUMNS + j % COLUMNS));
        }
    }
    const size_t bytes = values.size() * sizeof(uint16_t);
    ggml_backend_tensor_set(b_, values.data(), bytes * slot, bytes);
}

} // namespace loraproxy
