// The delta of one node on the tensor's own device, as a small ggml graph: no kernel of ours per device.
//
// A second backend instance computes it on the node's device while the scheduler waits in its callback. Leaf tensors
// laid over X and over the product, at their own addresses, let the graph read and correct them in place.
// Everything goes through ggml's public API.
#include "device_stack.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdint>
#include <exception>

namespace loraproxy {

namespace {

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

// Our own instance of one device's backend, and the adapters kept there.
class Device {
public:
    explicit Device(ggml_backend_dev_t device) : backend_(ggml_backend_dev_init(device, nullptr)) {
        if (!backend_) {
            return;
        }
        allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
        // a device that computes on the CPU spends longer waiting for its threads than on graphs of this size
        void * set_n_threads = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
        if (set_n_threads != nullptr) {
            reinterpret_cast<ggml_backend_set_n_threads_t>(set_n_threads)(backend_.get(), 1);
        }
    }

    std::string apply(ggml_tensor * node, const Target & target, int target_index, const std::vector<Group> & groups) {
        if (!backend_) {
            return "its device gives no second backend instance";
        }
        const ggml_tensor * x = node->src[1];
        if (target.op == Op::mul_mat && !ggml_backend_supports_buft(backend_.get(), ggml_backend_buffer_get_type(buffer_of(x)))) {
            return "its input lies outside the device";
        }
        DeviceStack & stack = stacks_.try_emplace(target_index, backend_.get(), target).first->second;
        if (const std::string problem = stack.admit(groups); !problem.empty()) {
            return problem;
        }
        inputs_.clear();
        const size_t n_tensors = 16 + 12 * groups.size();
        metadata_.resize(std::max(metadata_.size(), n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false)));
        context_.reset(ggml_init({metadata_.size(), metadata_.data(), true}));
        ggml_tensor * const out   = lay_over(node);
        ggml_tensor * const sum   = add_deltas(out, x, target, stack, groups);
        ggml_cgraph * const graph = ggml_new_graph_custom(context_.get(), n_tensors, false);
        ggml_build_forward_expand(graph, sum);
        return compute(graph);
    }

    void forget(const AdapterWeights * owner) {
        for (auto & entry : stacks_) {
            entry.second.forget(owner);
        }
    }

private:
    // A leaf of our graph at the address of a (n, rows) tensor of the running one.
    ggml_tensor * lay_over(const ggml_tensor * tensor) {
        ggml_tensor * leaf = ggml_new_tensor_2d(context_.get(), tensor->type, tensor->ne[0], tensor->ne[1]);
        leaf->nb[1]        = tensor->nb[1];
        leaf->nb[2] = leaf->nb[3] = tensor->nb[1] * tensor->ne[1];
        ggml_backend_tensor_alloc(buffer_of(tensor), leaf, tensor->data);
        return leaf;
    }

    // A leaf to be filled with `data`, which must live until the graph is computed. Its own tensor, never a view into
    // a larger one: devices want aligned addresses.
    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1, const void * data) {
        ggml_tensor * leaf = ggml_new_tensor_2d(context_.get(), type, ne0, ne1);
        ggml_set_input(leaf);
        inputs_.emplace_back(leaf, data);
        return leaf;
    }

    // out + scale * B (A x), every row's first adapter, then every row's second and so on. Not all at once by
    // mul_mat_id: devices rely on a row's ids being different, and the zero slot would come twice.
    ggml_tensor * add_deltas(ggml_tensor * out, const ggml_tensor * x, const Target & target, const DeviceStack & stack,
                             const std::vector<Group> & groups) {
        ggml_context * const ctx      = context_.get();
        const int64_t        n_rows   = out->ne[1];
        const int64_t        n_passes = spread(n_rows, stack, groups);
        const bool           one_slot = groups.front().whole_step && stack.slots_are_aligned();
        ggml_tensor *        in       = nullptr;
        if (target.op == Op::mul_mat) {
            in = lay_over(x);
        } else {
            find_rows(x, stack);
        }
        for (int64_t pass = 0; pass < n_passes; ++pass) {
            const int64_t first   = pass * n_rows;
            ggml_tensor * ids     = one_slot ? nullptr : input(GGML_TYPE_I32, 1, n_rows, &ids_[first]);
            const auto    product = [&](ggml_tensor * stacked, ggml_tensor * values) {
                if (one_slot) {
                    return ggml_mul_mat(ctx, ggml_view_2d(ctx, stacked, stacked->ne[0], stacked->ne[1], stacked->nb[1],
                                                          ids_[first] * stacked->nb[2]), values);
                }
                const size_t  stride = values->nb[1];
                ggml_tensor * each   = ggml_view_3d(ctx, values, values->ne[0], 1, n_rows, stride, stride, 0);
                return ggml_reshape_2d(ctx, ggml_mul_mat_id(ctx, stacked, each, ids), stacked->ne[1], n_rows);
            };
            ggml_tensor * y      = target.op == Op::mul_mat
                                       ? product(stack.a(), in)
                                       : ggml_get_rows(ctx, stack.a(), input(GGML_TYPE_I32, n_rows, 1, &rows_[first]));
            ggml_tensor * scales = input(GGML_TYPE_F32, 1, n_rows, &scales_[first]);
            out                  = ggml_add_inplace(ctx, out, ggml_mul(ctx, product(stack.b(), y), scales));
        }
        return out;
    }

    // Fills ids_ and scales_, (passes, rows): slot and scale of every row's adapters, in the order of their ids.
    // Returns the number of passes.
    int64_t spread(int64_t n_rows, const DeviceStack & stack, const std::vector<Group> & groups) {
        std::vector<int64_t> passes(n_rows, 0);
        ids_.clear();
        scales_.clear();
        for (const Group & group : groups) {
            const int slot = stack.slot_of(group.owner);
            for (int i = 0; i < group.n_rows; ++i) {
                const int64_t row   = group.rows[i];
                const size_t  place = passes[row]++ * n_rows + row;
                if (place >= ids_.size()) {
                    ids_.resize(passes[row] * n_rows, 0);
                    scales_.resize(passes[row] * n_rows, 0.0f);
                }
                ids_[place]    = slot;
                scales_[place] = DeviceStack::SCALE * group.pair->scale * group.scales[i];
            }
        }
        return ids_.size() / n_rows;
    }

    // Fills rows_, (passes, rows): where a get_rows target's stacked A has the values for each row's token.
    void find_rows(const ggml_tensor * tokens, const DeviceStack & stack) {
        const size_t n = tokens->ne[0];
        tokens_.resize(n);
        ggml_backend_tensor_get(tokens, tokens_.data(), 0, n * sizeof(int32_t));
        rows_.resize(ids_.size());
        for (size_t i = 0; i < ids_.size(); ++i) {
            rows_[i] = stack.row_of(ids_[i], tokens_[i % n]);
        }
    }

    std::string compute(ggml_cgraph * graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            if (!ggml_backend_supports_op(backend_.get(), node)) {
                return std::string("its device ") + ggml_backend_name(backend_.get()) + " does not compute " + ggml_op_desc(node);
            }
        }
        if (!ggml_gallocr_alloc_graph(allocator_.get(), graph)) {
            return "the device has no memory left for intermediate values";
        }
        for (const auto & [leaf, data] : inputs_) {
            ggml_backend_tensor_set_async(backend_.get(), leaf, data, 0, ggml_nbytes(leaf));
        }
        const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph);
        return status == GGML_STATUS_SUCCESS ? "" : std::string("its device failed: ") + ggml_status_to_string(status);
    }

    ggml_backend_ptr                                   backend_; // first: what follows lives in its memory
    ggml_gallocr_ptr                                   allocator_;
    std::unordered_map<int, DeviceStack>                     stacks_; // by target index
    // of the node at work
    std::vector<uint8_t>                               metadata_;
    ggml_context_ptr                                   context_; // in metadata_
    std::vector<std::pair<ggml_tensor *, const void *>> inputs_;
    std::vector<int32_t>                               tokens_;
    std::vector<int32_t>                               ids_;
    std::vector<int32_t>                               rows_;
    std::vector<float>                                 scales_;
};

class DeviceKernel final : public DeltaKernel {
public:
    std::string apply(const std::vector<Work> & works) override {
        for (const Work & work : works) {
            if (work.groups.empty()) {
                continue;
            }
            const std::string problem = apply(work.node, *work.target, work.index, work.groups);
            if (!problem.empty()) {
                return problem;
            }
        }
        return "";
    }

    std::string apply(ggml_tensor * node, const Target & target, int target_index, const std::vector<Group> & groups) {
        try {
            ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer_of(node)));
            if (device == nullptr && ggml_backend_buffer_is_host(buffer_of(node))) {
                device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); // plain host buffers name none
            }
            if (device == nullptr) {
                return "its buffer belongs to no device";
            }
            auto & entry = devices_[device];
            if (!entry) {
                entry = std::make_unique<Device>(device);
            }
            return entry->apply(node, target, target_index, groups);
        } catch (const std::exception & error) { // nothing may be thrown through ggml's scheduler
            return error.what();
        }
    }

    void forget(const AdapterWeights * owner) override {
        for (auto & entry : devices_) {
            entry.second->forget(owner);
        }
    }

private:
    std::unordered_map<ggml_backend_dev_t, std::unique_ptr<Device>> devices_;
};

} // namespace

std::unique_ptr<DeltaKernel> make_device_kernel() { return std::make_unique<DeviceKernel>(); }

} // namespace loraproxy
