// loraproxy._native: the delta path and the engine's hot calls into llama.cpp, for Python.
#include "delta.h"
#include "sampling.h"

#include "llama.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace nb = nanobind;
using namespace loraproxy;

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class WeightsBuilder {
public:
    WeightsBuilder(const Delta & delta, bool eight_bits) : targets_(delta.targets()), eight_bits_(eight_bits) {}

    void add(int target_index, const Matrix & a, const Matrix & b, float scale) {
        if (target_index < 0 || static_cast<size_t>(target_index) >= targets_.size()) {
            throw std::invalid_argument("no such target");
        }
        const Target & target = targets_[target_index];
        const size_t   rank   = a.shape(0);
        if (rank < 1 || a.shape(1) != static_cast<size_t>(target.n_in) || b.shape(1) != rank ||
            b.shape(0) != static_cast<size_t>(target.n_out)) {
            throw std::invalid_argument(target.name + ": expected A (rank, " + std::to_string(target.n_in) + ") and B (" +
                                        std::to_string(target.n_out) + ", rank)");
        }
        nb::gil_scoped_release released;
        const Form form = target.op == Op::get_rows                 ? Form::by_token
                          : eight_bits_ && target.quantized ? Form::eight_bits
                                                            : Form::f16;
        parts_.push_back(convert(kernels_, a.data(), b.data(), rank, a.shape(1), b.shape(0), scale, form));
        parts_.back().target = target_index;
    }

    std::shared_ptr<AdapterWeights> finish() {
        nb::gil_scoped_release released;
        return std::make_shared<AdapterWeights>(targets_.size(), std::move(parts_));
    }

private:
    std::vector<Target>               targets_;
    bool                              eight_bits_;
    std::vector<AdapterWeights::Part> parts_;
    const Kernels &                   kernels_ = *choose_kernels(); // any: all round alike
};

llama_context * as_context(uintptr_t address) { return reinterpret_cast<llama_context *>(address); }

// One llama_decode; the batch's arrays live as long as the call.
int decode(llama_context * ctx, const std::vector<int32_t> & tokens, const std::vector<int32_t> & positions,
           std::vector<int32_t> sequences, std::vector<int8_t> outputs) {
    const size_t           n = tokens.size();
    std::vector<int32_t>   n_seq(n, 1);
    std::vector<int32_t *> seq(n);
    for (size_t i = 0; i < n; ++i) {
        seq[i] = &sequences[i];
    }
    llama_batch batch = {};
    batch.n_tokens    = static_cast<int32_t>(n);
    batch.token       = const_cast<int32_t *>(tokens.data());
    batch.pos         = const_cast<int32_t *>(positions.data());
    batch.n_seq_id    = n_seq.data();
    batch.seq_id      = seq.data();
    batch.logits      = outputs.data();
    return llama_decode(ctx, batch);
}

using Outcome = std::pair<int, std::string>;

// One token each of several sequences; all give logits. Ids must be consecutive and rising.
Outcome decode_rows(uintptr_t ctx, Delta * delta, const std::vector<int32_t> & tokens,
                    const std::vector<int32_t> & positions, const std::vector<int32_t> & sequences,
                    const std::vector<Delta::Set> & sets) {
    if (positions.size() != tokens.size() || sequences.size() != tokens.size() || sets.size() != tokens.size()) {
        throw std::invalid_argument("tokens, positions, sequences and sets differ in length");
    }
    nb::gil_scoped_release released;
    if (delta) {
        delta->begin_rows(sets);
    }
    const int rc = decode(as_context(ctx), tokens, positions, sequences, std::vector<int8_t>(tokens.size(), 1));
    return {rc, delta ? delta->end() : std::string()};
}

// Some tokens of one sequence from position `first`; `last_logits`: the last one gives logits.
Outcome decode_chunk(uintptr_t ctx, Delta * delta, const std::vector<int32_t> & tokens, int32_t first, int32_t sequence,
                     bool last_logits, const Delta::Set & set) {
    const size_t         n = tokens.size();
    nb::gil_scoped_release released;
    std::vector<int32_t> positions(n);
    for (size_t i = 0; i < n; ++i) {
        positions[i] = first + static_cast<int32_t>(i);
    }
    std::vector<int8_t> outputs(n, 0);
    if (n > 0) {
        outputs[n - 1] = last_logits ? 1 : 0;
    }
    if (delta) {
        delta->begin_chunk(set, static_cast<int>(n));
    }
    const int rc = decode(as_context(ctx), tokens, positions, std::vector<int32_t>(n, sequence), std::move(outputs));
    return {rc, delta ? delta->end() : std::string()};
}

nb::ndarray<nb::numpy, float, nb::ndim<1>> logits(uintptr_t ctx, int32_t index) {
    const llama_model * model  = llama_get_model(as_context(ctx));
    const size_t        n      = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const float *       source = llama_get_logits_ith(as_context(ctx), index);
    if (source == nullptr) {
        throw std::invalid_argument("no logits at this index");
    }
    float * copy = new float[n];
    std::copy(source, source + n, copy);
    nb::capsule owner(copy, [](void * p) noexcept { delete[] static_cast<float *>(p); });
    return nb::ndarray<nb::numpy, float, nb::ndim<1>>(copy, {n}, owner);
}

nb::bytes sequence_state(uintptr_t ctx, int32_t sequence) {
    std::vector<uint8_t> data;
    {
        nb::gil_scoped_release released;
        data.resize(llama_state_seq_get_size(as_context(ctx), sequence));
        data.resize(llama_state_seq_get_data(as_context(ctx), data.data(), data.size(), sequence));
    }
    return nb::bytes(data.data(), data.size());
}

bool restore_sequence(uintptr_t ctx, int32_t sequence, nb::bytes state) {
    const auto * data = static_cast<const uint8_t *>(state.data());
    const size_t size = state.size();
    nb::gil_scoped_release released;
    return llama_state_seq_set_data(as_context(ctx), data, size, sequence) > 0;
}

// W x for one weight of `n_out` rows and every row of x, as a step computes it: (n_rows, n_out).
nb::ndarray<nb::numpy, float, nb::ndim<2>> base_product(int type, nb::bytes weights, size_t n_out, const Matrix & x) {
    const size_t        n_rows = x.shape(0), n_in = x.shape(1);
    const auto          kind    = static_cast<ggml_type>(type);
    const bool          known   = type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(kind) > 0;
    const BaseProduct * product = known ? choose_base_product(kind, static_cast<int64_t>(n_in)) : nullptr;
    if (product == nullptr) {
        throw std::invalid_argument("no kernel for this type and length on this processor");
    }
    const size_t row_bytes = ggml_row_size(kind, static_cast<int64_t>(n_in));
    if (n_rows < 1 || n_out < 1 || weights.size() != row_bytes * n_out) {
        throw std::invalid_argument("the weights' size does not fit their type and shape");
    }
    Activations quantized;
    quantized.resize(static_cast<int>(n_rows), static_cast<int>(n_in));
    float *     out = new float[n_rows * n_out];
    nb::capsule owner(out, [](void * p) noexcept { delete[] static_cast<float *>(p); });
    for (size_t i = 0; i < n_rows; ++i) {
        product->quantize(x.data() + i * n_in, quantized, static_cast<int>(i));
    }
    for (size_t first = 0; first < n_rows; first += BATCH_ROWS) {
        const size_t n = std::min<size_t>(BATCH_ROWS, n_rows - first);
        for (size_t j = 0; j < n_out; j += TILE_ROWS) {
            float * rows[BATCH_ROWS];
            for (size_t i = 0; i < n; ++i) {
                rows[i] = out + (first + i) * n_out + j;
            }
            product->product(static_cast<const uint8_t *>(weights.data()) + j * row_bytes, row_bytes,
                             static_cast<int>(std::min<size_t>(TILE_ROWS, n_out - j)), quantized,
                             static_cast<int>(first), static_cast<int>(n), rows);
        }
    }
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(out, {n_rows, n_out}, owner);
}

void bind_sampling(nb::module_ & m) {
    m.def("sample_rows", [](uintptr_t ctx, const std::vector<int32_t> & rows, const std::vector<uintptr_t> & chains,
                            const std::vector<uintptr_t> & grammars, int n_threads) {
        nb::gil_scoped_release released;
        return sample_rows(as_context(ctx), rows, chains, grammars, n_threads);
    });
    m.def("top_logprobs", [](uintptr_t ctx, int32_t row, int32_t chosen, int n) {
        nb::gil_scoped_release released;
        return top_logprobs(as_context(ctx), row, chosen, n);
    });
    m.def("sample_with_probs", [](uintptr_t ctx, int32_t row, uintptr_t chain, uintptr_t grammar, int n) {
        nb::gil_scoped_release released;
        return sample_with_probs(as_context(ctx), row, chain, grammar, n);
    });
}

} // namespace

NB_MODULE(_native, m) {
    nb::enum_<Op>(m, "Op").value("mul_mat", Op::mul_mat).value("get_rows", Op::get_rows);
    nb::class_<Target>(m, "Target")
        .def_ro("name", &Target::name)
        .def_ro("op", &Target::op)
        .def_ro("n_in", &Target::n_in)
        .def_ro("n_out", &Target::n_out)
        .def_ro("visits", &Target::visits)
        .def_ro("quantized", &Target::quantized)
        .def_ro("refusal", &Target::refusal);
    nb::class_<AdapterWeights>(m, "AdapterWeights").def_prop_ro("nbytes", &AdapterWeights::bytes);
    nb::class_<WeightsBuilder>(m, "WeightsBuilder")
        .def(nb::init<const Delta &, bool>(), nb::arg("delta"), nb::arg("eight_bits"))
        .def("add", &WeightsBuilder::add, nb::arg("target"), nb::arg("a"), nb::arg("b"), nb::arg("scale"))
        .def("finish", &WeightsBuilder::finish);
    nb::class_<Delta>(m, "Delta")
        .def("__init__",
             [](Delta * self, int n_threads, const std::string & kernels, bool own_products) {
                 if (choose_kernels(kernels.c_str()) == nullptr) {
                     throw std::invalid_argument("this processor or build has no kernels named '" + kernels + "'");
                 }
                 new (self) Delta(n_threads, kernels.c_str(), own_products);
             },
             nb::arg("n_threads"), nb::arg("kernels") = "", nb::arg("own_products") = true)
        .def_prop_ro("user_data", [](Delta & self) { return reinterpret_cast<uintptr_t>(&self); })
        .def_prop_ro_static("callback", [](nb::handle) { return reinterpret_cast<uintptr_t>(&Delta::callback); })
        .def_static("has_kernels", [](const std::string & name) { return choose_kernels(name.c_str()) != nullptr; })
        .def("watch_begin", &Delta::watch_begin)
        .def("watch_end", &Delta::watch_end)
        .def_prop_ro("targets", &Delta::targets)
        .def("find_target", &Delta::find_target)
        .def("add_adapter", [](Delta & self, int64_t id, std::shared_ptr<AdapterWeights> w) { self.add_adapter(id, std::move(w)); })
        .def("remove_adapter", &Delta::remove_adapter)
        .def("adapter_bytes", &Delta::adapter_bytes)
        .def("begin_rows", &Delta::begin_rows)
        .def("begin_chunk", &Delta::begin_chunk)
        .def("end", &Delta::end)
        .def("use_device_kernel", &Delta::use_device_kernel)
        .def_prop_ro("kernel_name", &Delta::kernel_name)
        .def_prop_ro("own_products", &Delta::own_products)
        .def_prop_ro("cuts", &Delta::cuts);
    m.def("decode_rows", &decode_rows, nb::arg("ctx"), nb::arg("delta").none(), nb::arg("tokens"), nb::arg("positions"),
          nb::arg("sequences"), nb::arg("sets"));
    m.def("decode_chunk", &decode_chunk, nb::arg("ctx"), nb::arg("delta").none(), nb::arg("tokens"), nb::arg("first"),
          nb::arg("sequence"), nb::arg("last_logits"), nb::arg("set"));
    m.def("base_product", &base_product, nb::arg("type"), nb::arg("weights"), nb::arg("n_out"), nb::arg("x"));
    m.def("logits", &logits);
    m.def("sequence_state", &sequence_state);
    m.def("restore_sequence", &restore_sequence);
    bind_sampling(m);
}
