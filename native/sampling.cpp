#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <string_view>

namespace loraproxy {

namespace {

llama_sampler * as_sampler(uintptr_t address) { return reinterpret_cast<llama_sampler *>(address); }

int32_t vocab_size(llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

const float * row_logits(llama_context * ctx, int32_t row) {
    const float * logits = llama_get_logits_ith(ctx, row);
    if (logits == nullptr) {
        throw std::invalid_argument("no logits at this row");
    }
    return logits;
}

struct Candidates {
    std::vector<llama_token_data> data;
    llama_token_data_array        array{};

    void fill(const float * logits, int32_t n) {
        data.resize(n);
        for (int32_t i = 0; i < n; ++i) {
            data[i] = {i, logits[i], 0.0f};
        }
        array = {data.data(), data.size(), -1, false};
    }
};

bool grammar_allows(llama_sampler * grammar, int32_t token) {
    llama_token_data       one   = {token, 1.0f, 0.0f};
    llama_token_data_array array = {&one, 1, -1, false};
    llama_sampler_apply(grammar, &array);
    return one.logit != -INFINITY;
}

// The chosen token. Where everything is forbidden (by the grammar, by biases) a chain still selects something: that
// is refused, and must be before the grammar sees it, since llama.cpp aborts the process for an end it does not allow.
int32_t selected(const Candidates & c) {
    if (c.array.selected < 0 || static_cast<size_t>(c.array.selected) >= c.array.size ||
        !(c.array.data[c.array.selected].logit > -INFINITY)) {
        throw std::runtime_error("the sampler chain left no token to choose from");
    }
    return c.array.data[c.array.selected].id;
}

int32_t choose(const float * logits, int32_t n_vocab, llama_sampler * chain, llama_sampler * grammar, Candidates & c) {
    c.fill(logits, n_vocab);
    llama_sampler_apply(chain, &c.array);
    int32_t token = selected(c);
    if (grammar != nullptr && !grammar_allows(grammar, token)) {
        c.fill(logits, n_vocab);
        llama_sampler_apply(grammar, &c.array);
        llama_sampler_apply(chain, &c.array);
        token = selected(c);
    }
    if (grammar != nullptr) {
        llama_sampler_accept(grammar, token);
    }
    llama_sampler_accept(chain, token);
    return token;
}

bool is_greedy(llama_sampler * chain) {
    return llama_sampler_chain_n(chain) == 1 &&
           std::string_view(llama_sampler_name(llama_sampler_chain_get(chain, 0))) == "greedy";
}

int32_t argmax(const float * logits, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

} // namespace

std::vector<int32_t> sample_rows(llama_context * ctx, const std::vector<int32_t> & rows,
                                 const std::vector<uintptr_t> & chains, const std::vector<uintptr_t> & grammars,
                                 int n_threads) {
    const int     n       = static_cast<int>(rows.size());
    const int32_t n_vocab = vocab_size(ctx);
    if (chains.size() != rows.size() || grammars.size() != rows.size()) {
        throw std::invalid_argument("rows, chains and grammars differ in length");
    }
    std::vector<const float *> logits(n);
    for (int i = 0; i < n; ++i) {
        logits[i] = row_logits(ctx, rows[i]);
    }
    std::vector<int32_t>     tokens(n, -1);
    std::vector<std::string> problems(n);
    (void) n_threads;
#pragma omp parallel num_threads(n_threads)
    {
        Candidates candidates;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < n; ++i) {
            try {
                llama_sampler * chain = as_sampler(chains[i]);
                tokens[i] = grammars[i] == 0 && is_greedy(chain)
                                ? argmax(logits[i], n_vocab)
                                : choose(logits[i], n_vocab, chain, as_sampler(grammars[i]), candidates);
            } catch (const std::exception & e) {
                problems[i] = e.what(); // the caller fails this row alone: its token stays -1
            }
        }
    }
    return tokens;
}

std::pair<float, std::vector<TokenLogprob>> top_logprobs(llama_context * ctx, int32_t row, int32_t chosen, int n) {
    const float * logits  = row_logits(ctx, row);
    const int32_t n_vocab = vocab_size(ctx);
    const float   largest = logits[argmax(logits, n_vocab)];
    double        sum     = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i] - largest));
    }
    const double norm = largest + std::log(sum);
    std::vector<int32_t> order(n_vocab);
    for (int32_t i = 0; i < n_vocab; ++i) {
        order[i] = i;
    }
    n = std::clamp<int>(n, 0, n_vocab);
    std::partial_sort(order.begin(), order.begin() + n, order.end(), [logits](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    std::vector<TokenLogprob> top;
    for (int i = 0; i < n; ++i) {
        top.emplace_back(order[i], static_cast<float>(logits[order[i]] - norm));
    }
    return {static_cast<float>(logits[chosen] - norm), top};
}

std::tuple<int32_t, float, std::vector<TokenLogprob>> sample_with_probs(llama_context * ctx, int32_t row,
                                                                        uintptr_t chain, uintptr_t grammar, int n) {
    Candidates    c;
    const int32_t token = choose(row_logits(ctx, row), vocab_size(ctx), as_sampler(chain), as_sampler(grammar), c);
    float         largest = -INFINITY;
    for (size_t i = 0; i < c.array.size; ++i) {
        largest = std::max(largest, c.array.data[i].logit);
    }
    double sum = 0.0;
    for (size_t i = 0; i < c.array.size; ++i) {
        sum += std::exp(static_cast<double>(c.array.data[i].logit - largest));
    }
    float                     chosen = 0.0f;
    std::vector<TokenLogprob> all;
    for (size_t i = 0; i < c.array.size; ++i) {
        const auto & d = c.array.data[i];
        const auto   p = static_cast<float>(std::exp(static_cast<double>(d.logit - largest)) / sum);
        all.emplace_back(d.id, p);
        chosen = d.id == token ? p : chosen;
    }
    std::stable_sort(all.begin(), all.end(), [](const TokenLogprob & a, const TokenLogprob & b) { return a.second > b.second; });
    all.resize(std::min<size_t>(all.size(), std::max(n, 0)));
    return {token, chosen, all};
}

} // namespace loraproxy
