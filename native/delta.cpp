#include "delta.h"

#include <algorithm>

namespace loraproxy {

namespace {

bool is_host(const ggml_tensor * tensor) {
    const ggml_tensor * base = tensor->view_src ? tensor->view_src : tensor;
    return base->buffer == nullptr || ggml_backend_buffer_is_host(base->buffer);
}

bool is_projection(const ggml_tensor * node) {
    // model weights are leaves with a name; products of two activations (attention scores) are not
    const ggml_tensor * w = node->src[0];
    return w != nullptr && w->op == GGML_OP_NONE && w->view_src == nullptr && w->name[0] != '\0';
}

} // namespace

Delta::Delta(int n_threads, const char * force_kernels, bool own_products)
    : host_(make_host_kernel(n_threads, force_kernels)), n_threads_(n_threads), force_kernels_(force_kernels),
      own_products_(own_products) {
    const Kernels * kernels = choose_kernels(force_kernels);
    kernel_name_            = kernels ? kernels->name : "none";
}

Delta::~Delta() = default;

bool Delta::callback(ggml_tensor * node, bool ask, void * user_data) {
    Delta & self = *static_cast<Delta *>(user_data);
    if (ask) {
        return self.ask(node);
    }
    self.computed(node);
    return true; // going on is the only way that leaves llama.cpp's state whole; end() reports what went wrong
}

// -- learning the graph ------------------------------------------------------------------------------------

void Delta::watch_begin() {
    watching_      = true;
    watched_       = nullptr;
    watched_index_ = -1;
    for (Target & target : targets_) {
        target.visits = 0;
    }
}

void Delta::watch_end() {
    watching_ = false;
    for (Target & target : targets_) {
        if (target.refusal.empty() && target.visits != 1) {
            target.refusal = "the graph computes it " + std::to_string(target.visits) + " times in one pass";
        }
        if (!target.refusal.empty()) {
            target.base = nullptr;
        }
    }
}

void Delta::use_device_kernel() {
    host_tensors_too_ = true;
    for (Target & target : targets_) {
        target.base = nullptr; // it only adds to what llama.cpp computed
    }
}

int Delta::own_products() const {
    return static_cast<int>(std::count_if(targets_.begin(), targets_.end(), [](const Target & t) { return t.base; }));
}

namespace {

// Such a node only describes memory: nothing is read or written.
bool computes_nothing(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

} // namespace

void Delta::watch(ggml_tensor * node) {
    if (computes_nothing(node)) {
        return;
    }
    const ggml_tensor * before       = watched_;
    const int           before_index = watched_index_;
    watched_                         = node;
    watched_index_                   = -1;
    const ggml_tensor * src0         = node->src[0];
    // a weight with its own scale tensor (NVFP4) is scaled after the product: the delta would be scaled too
    if (node->op == GGML_OP_MUL && src0 != nullptr && src0->op == GGML_OP_MUL_MAT && node->src[1] != nullptr) {
        const std::string scale = node->src[1]->name;
        const int         index = lookup(src0);
        if (index >= 0 && scale.size() > 6 && scale.compare(scale.size() - 6, 6, ".scale") == 0) {
            targets_[index].refusal = "the weight is scaled after the product by " + scale;
        }
        return;
    }
    if ((node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_GET_ROWS) || !is_projection(node)) {
        return;
    }
    const Op op = node->op == GGML_OP_MUL_MAT ? Op::mul_mat : Op::get_rows;
    if (op == Op::get_rows && (src0->ne[1] <= 1 || node->src[1]->type != GGML_TYPE_I32)) {
        return;
    }
    int index = find_target(src0->name, op);
    if (index < 0) {
        index = static_cast<int>(targets_.size());
        by_name_[static_cast<int>(op)].emplace(src0->name, index);
        Target target;
        target.name  = src0->name;
        target.op    = op;
        target.n_in  = op == Op::mul_mat ? src0->ne[0] : src0->ne[1];
        target.n_out = op == Op::mul_mat ? src0->ne[1] : src0->ne[0];
        targets_.push_back(std::move(target));
    }
    Target & target = targets_[index];
    ++target.visits;
    const ggml_tensor * x = node->src[1];
    watched_index_        = index;
    // computed one after the other from the same x: one cut serves both
    if (op == Op::mul_mat && before_index >= 0 && before->op == GGML_OP_MUL_MAT && before->src[1] == x) {
        targets_[before_index].next = index;
    }
    target.quantized = op == Op::mul_mat && is_host(src0) && ggml_is_quantized(src0->type);
    if (own_products_ && op == Op::mul_mat && is_host(src0) && ggml_is_contiguous(src0)) {
        target.base = choose_base_product(src0->type, src0->ne[0], force_kernels_.c_str());
    }
    if (node->type != GGML_TYPE_F32 || (op == Op::mul_mat && x->type != GGML_TYPE_F32)) {
        target.refusal = "its input or result is not F32";
    } else if (node->ne[2] * node->ne[3] != 1 || src0->ne[2] * src0->ne[3] != 1) {
        target.refusal = "it is not a matrix product of two dimensions";
    } else if (node->nb[0] != sizeof(float) || (op == Op::mul_mat && x->nb[0] != sizeof(float))) {
        target.refusal = "its rows are not contiguous";
    }
}

int Delta::find_target(const std::string & name, Op op) const {
    const auto & map = by_name_[static_cast<int>(op)];
    const auto   it  = map.find(name);
    return it == map.end() ? -1 : it->second;
}

int Delta::lookup(const ggml_tensor * node) const {
    if (!is_projection(node)) {
        return -1;
    }
    return find_target(node->src[0]->name, node->op == GGML_OP_MUL_MAT ? Op::mul_mat : Op::get_rows);
}

// -- adapters ----------------------------------------------------------------------------------------------

void Delta::add_adapter(int64_t id, std::shared_ptr<const AdapterWeights> weights) {
    remove_adapter(id);
    adapters_[id] = std::move(weights);
}

void Delta::remove_adapter(int64_t id) {
    const auto it = adapters_.find(id);
    if (it == adapters_.end()) {
        return;
    }
    host_->forget(it->second.get());
    if (device_) {
        device_->forget(it->second.get());
    }
    adapters_.erase(it);
}

size_t Delta::adapter_bytes(int64_t id) const {
    const auto it = adapters_.find(id);
    return it == adapters_.end() ? 0 : it->second->bytes();
}

// -- one step ----------------------------------------------------------------------------------------------

void Delta::start(int n_rows) {
    running_ = true;
    n_rows_  = n_rows;
    pending_ = nullptr;
    error_.clear();
    adapters_running_.clear();
    active_.assign(targets_.size(), 0);
    seen_.assign(targets_.size(), 0);
}

void Delta::join(int row, const Set & set) {
    for (const auto & [id, scale] : set) {
        auto it = std::lower_bound(adapters_running_.begin(), adapters_running_.end(), id,
                                   [](const Running & r, int64_t wanted) { return r.id < wanted; });
        if (it == adapters_running_.end() || it->id != id) {
            const auto known = adapters_.find(id);
            if (known == adapters_.end()) {
                return fail("adapter " + std::to_string(id) + " is not loaded");
            }
            it = adapters_running_.insert(it, Running{id, known->second.get(), {}, {}});
        }
        it->rows.push_back(row);
        it->scales.push_back(scale);
    }
}

void Delta::activate() {
    for (const Running & adapter : adapters_running_) {
        for (size_t t = 0; t < adapter.weights->n_targets(); ++t) {
            active_[t] |= adapter.weights->pair(static_cast<int>(t)) != nullptr;
        }
    }
}

void Delta::begin_rows(const std::vector<Set> & sets) {
    start(static_cast<int>(sets.size()));
    one_set_ = false;
    for (size_t row = 0; row < sets.size(); ++row) {
        join(static_cast<int>(row), sets[row]);
    }
    activate();
}

void Delta::begin_chunk(const Set & set, int n_rows) {
    start(n_rows);
    one_set_ = true;
    for (int row = 0; row < n_rows; ++row) {
        join(row, set);
    }
    activate();
}

std::string Delta::end() {
    hand_back();
    if (running_ && error_.empty()) {
        for (size_t t = 0; t < active_.size(); ++t) {
            if ((active_[t] || targets_[t].base != nullptr) && seen_[t] != 1) {
                fail(targets_[t].name + " was computed " + std::to_string(seen_[t]) +
                     " times in one step instead of once");
                break;
            }
        }
    }
    running_ = false;
    return error_;
}

void Delta::fail(const std::string & reason) {
    if (error_.empty()) {
        error_ = reason;
    }
}

bool Delta::ask(ggml_tensor * node) {
    if (watching_) {
        watch(node);
        return false;
    }
    if (!running_ || computes_nothing(node)) {
        return false;
    }
    const bool projects = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_GET_ROWS;
    const int  index    = projects ? lookup(node) : -1;
    if (pending_ != nullptr && index != targets_[pending_index_].next) {
        fail(targets_[pending_index_].name + " is not followed by the product that followed it at the start");
        pending_ = nullptr;
    }
    if (index < 0) {
        return false;
    }
    const Target & target = targets_[index];
    take_over(node, target);
    if (!active_[index] && target.base == nullptr) {
        return false;
    }
    if (pending_ == nullptr && target.next >= 0 && (active_[target.next] || targets_[target.next].base != nullptr)) {
        pending_       = node;
        pending_index_ = index;
        return false;
    }
    ++cuts_;
    return true;
}

// Until it is handed back the node is nothing to llama.cpp, which leaves its memory alone.
void Delta::take_over(ggml_tensor * node, const Target & target) {
    if (target.base != nullptr) {
        node->op = GGML_OP_NONE;
        taken_.push_back(node);
    }
}

void Delta::hand_back() {
    for (ggml_tensor * node : taken_) {
        node->op = GGML_OP_MUL_MAT; // llama.cpp keeps the graph for the next decode
    }
    taken_.clear();
}

DeltaKernel * Delta::kernel_for(const ggml_tensor * node) {
    const ggml_tensor * base = node->view_src ? node->view_src : node;
    if (base->buffer == nullptr || (is_host(base) && !host_tensors_too_)) {
        return host_.get();
    }
    if (!device_) {
        device_ = make_device_kernel();
    }
    return device_.get();
}

void Delta::computed(ggml_tensor * node) {
    hand_back();
    works_.clear();
    if (pending_ != nullptr) {
        works_.emplace_back();
        if (!plan(pending_, pending_index_, works_.back())) {
            works_.pop_back();
        }
        pending_ = nullptr;
    }
    const int index = lookup(node);
    if (index >= 0) {
        works_.emplace_back();
        if (!plan(node, index, works_.back())) {
            works_.pop_back();
        }
    }
    if (works_.size() == 2 && works_[0].node->src[1] != works_[1].node->src[1]) {
        fail(works_[1].target->name + " does not multiply what it multiplied at the start");
    }
    if (works_.empty() || !error_.empty()) {
        return;
    }
    const std::string problem = kernel_for(node)->apply(works_);
    if (!problem.empty()) {
        fail(works_.back().target->name + ": " + problem);
    }
}

// What is to be done with one computed node; false: nothing, or it is a surprise.
bool Delta::plan(ggml_tensor * node, int index, Work & work) {
    if (seen_[index] < 255) {
        ++seen_[index];
    }
    const Target & target = targets_[index];
    const int64_t  rows   = node->ne[1];
    if (node->ne[0] != target.n_out || node->ne[2] * node->ne[3] != 1) {
        fail(target.name + " has an unexpected shape");
        return false;
    }
    // a chunk's last layer holds only the rows whose logits were asked for; all of them have the same set
    if (one_set_ ? rows > n_rows_ : rows != n_rows_) {
        fail(target.name + " has " + std::to_string(rows) + " rows where the step has " + std::to_string(n_rows_));
        return false;
    }
    if (rows == 0 || seen_[index] > 1) {
        return false;
    }
    work.node   = node;
    work.target = &target;
    work.index  = index;
    work.base   = target.base;
    for (const Running & adapter : adapters_running_) {
        if (const Pair * pair = adapter.weights->pair(index)) {
            const int n = one_set_ ? static_cast<int>(rows) : static_cast<int>(adapter.rows.size());
            work.groups.push_back({pair, adapter.weights, adapter.rows.data(), adapter.scales.data(), n, one_set_});
        }
    }
    return true;
}

} // namespace loraproxy
