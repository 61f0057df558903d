// The delta path: adds every token's own LoRA adapters to the projections of an unmodified llama.cpp graph.
//
// ggml's scheduler asks cb_eval about each node of the graph. Where the node is a targeted projection
// (MUL_MAT with a model weight as src[0], or GET_ROWS of the token embeddings) it is computed alone, and
// before anything reads its result, scale * B (A x) is added in place for every row, with the adapters of
// that row's request (the gather of Punica's SGMV, arXiv:2310.18547, and S-LoRA, arXiv:2311.03285).
//
// One engine thread owns a Delta: begin(), llama_decode(), end(). Adapters are prepared anywhere and enter and
// leave between steps.
#pragma once

#include "base_product.h"
#include "kernels.h"
#include "parallel.h"
#include "weights.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace loraproxy {

enum class Op { mul_mat, get_rows };

// One place of the graph that adapters can correct, found by watching one decode.
struct Target {
    std::string name; // the weight's GGUF name
    Op          op;
    int64_t     n_in;  // values in a row of x; for get_rows: the vocabulary
    int64_t     n_out; // values in a row of the result
    int         visits = 0; // how often the watched decode computed it
    int         next   = -1; // the target computed directly after it from the same x: both are corrected then
    std::string refusal;    // why it cannot be targeted; empty if it can
    bool quantized = false; // in host memory
    const BaseProduct * base = nullptr; // how we compute the base's product; nullptr: llama.cpp does
};

// The rows of the running step that use one pair of one adapter. Groups of a node are sorted by adapter id.
struct Group {
    const Pair *           pair;
    const AdapterWeights * owner;
    const int32_t *        rows;
    const float *          scales; // the request's scale for each row, without the pair's own
    int                    n_rows;
    bool                   whole_step; // a prompt chunk: every row of the node is under one set
};

// One node of the graph to be corrected; x = node->src[1].
struct Work {
    ggml_tensor *       node;
    const Target *      target;
    int                 index;
    const BaseProduct * base; // the node's own product is still to be computed; nullptr: it is there
    std::vector<Group>  groups;
};

// Adds the deltas to computed nodes. There is one implementation for tensors in host memory and one for tensors
// on a device.
class DeltaKernel {
public:
    virtual ~DeltaKernel() = default;
    // Works that come together have the same x. Returns "" or what went wrong.
    virtual std::string apply(const std::vector<Work> & works) = 0;
    // The adapter leaves: forget whatever was kept for it.
    virtual void forget(const AdapterWeights *) {}
};

std::unique_ptr<DeltaKernel> make_host_kernel(int n_threads, const char * force);
std::unique_ptr<DeltaKernel> make_device_kernel();

class Delta {
public:
    // `own_products`: compute the products of quantised weights in host memory, too, where there is a kernel.
    Delta(int n_threads, const char * force_kernels, bool own_products);
    ~Delta();

    // ggml_backend_sched_eval_callback; user_data is the Delta.
    static bool callback(ggml_tensor * node, bool ask, void * user_data);

    // Watch one decode and learn which weights it multiplies, and how often. Between the two, any decode.
    void watch_begin();
    void watch_end();
    const std::vector<Target> & targets() const { return targets_; }
    int find_target(const std::string & name, Op op) const;

    void add_adapter(int64_t id, std::shared_ptr<const AdapterWeights> weights);
    void remove_adapter(int64_t id);
    size_t adapter_bytes(int64_t id) const;

    // The adapters of one row: (adapter id, scale), sorted by id.
    using Set = std::vector<std::pair<int64_t, float>>;

    // The next llama_decode has `sets.size()` rows, row i under sets[i]; each must be known.
    void begin_rows(const std::vector<Set> & sets);
    // The next llama_decode holds one sequence's tokens only, all under `set`.
    void begin_chunk(const Set & set, int n_rows);
    // After llama_decode: "" or the surprise that makes the step's results void.
    std::string end();

    // From now on, tensors in host memory go the way of those on a device: for comparing the two.
    void use_device_kernel();

    const char * kernel_name() const { return kernel_name_; }
    // Weights whose products are computed here instead of by llama.cpp.
    int own_products() const;
    // Nodes at which the graph was cut since the start.
    uint64_t cuts() const { return cuts_; }

private:
    // One adapter of the running step, with its rows and each row's scale.
    struct Running {
        int64_t                id;
        const AdapterWeights * weights;
        std::vector<int32_t>   rows;
        std::vector<float>     scales;
    };

    bool ask(ggml_tensor * node);
    void computed(ggml_tensor * node);
    void take_over(ggml_tensor * node, const Target & target);
    void hand_back();
    bool plan(ggml_tensor * node, int index, Work & work);
    void watch(ggml_tensor * node);
    int  lookup(const ggml_tensor * node) const;
    void fail(const std::string & reason);
    void start(int n_rows);
    void join(int row, const Set & set);
    void activate();
    DeltaKernel * kernel_for(const ggml_tensor * node);

    std::vector<Target>                                                targets_;
    std::unordered_map<std::string, int>                               by_name_[2];
    std::unordered_map<int64_t, std::shared_ptr<const AdapterWeights>> adapters_;
    std::unique_ptr<DeltaKernel>                                       host_;
    std::unique_ptr<DeltaKernel>                                       device_; // made when first needed
    bool                                                               host_tensors_too_ = false;
    const char *                                                       kernel_name_;
    int                                                                n_threads_;
    std::string                                                        force_kernels_;
    bool                                                               own_products_;
    bool                                                               watching_ = false;
    uint64_t                                                           cuts_     = 0;

    // the running step
    bool                 running_   = false;
    bool                 one_set_   = false; // a chunk: all rows run under one set, however many a node has
    int                  n_rows_    = 0;
    std::vector<Running> adapters_running_; // sorted by id
    std::vector<uint8_t> active_; // by target: some adapter of this step has a pair for it
    std::vector<uint8_t> seen_;   // by target: times computed in this step
    std::vector<Work>    works_;
    std::vector<ggml_tensor *> taken_; // nodes that llama.cpp must not compute, until they are computed here
    ggml_tensor *        pending_       = nullptr; // computed with the node that follows it
    int                  pending_index_ = -1;
    std::string          error_;

    // while watching
    const ggml_tensor * watched_       = nullptr; // the last node that computes something
    int                 watched_index_ = -1;
};

} // namespace loraproxy
