// Sampling over the rows of one decode, with llama.cpp's samplers.
#pragma once

#include "llama.h"

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace loraproxy {

// (token, log-probability)
using TokenLogprob = std::pair<int32_t, float>;

// One token for each row: chains[i] is a llama_sampler chain, grammars[i] a grammar sampler or 0. Rows are
// sampled on up to n_threads threads. Samplers accept their token. As llama-server does, a grammar is first
// asked about the chain's choice alone, and applied to all candidates only if it refuses that.
std::vector<int32_t> sample_rows(llama_context * ctx, const std::vector<int32_t> & rows,
                                 const std::vector<uintptr_t> & chains, const std::vector<uintptr_t> & grammars,
                                 int n_threads);

// Softmax of the raw logits of a row: the log-probability of `chosen` and the n most likely tokens, best first.
std::pair<float, std::vector<TokenLogprob>> top_logprobs(llama_context * ctx, int32_t row, int32_t chosen, int n);

// Like sample_rows for one row, with the probabilities that the chain left: (token, its probability, up to n
// candidates with their probabilities, best first).
std::tuple<int32_t, float, std::vector<TokenLogprob>> sample_with_probs(llama_context * ctx, int32_t row,
                                                                        uintptr_t chain, uintptr_t grammar, int n);

} // namespace loraproxy
