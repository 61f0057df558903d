// The base's products and the deltas of nodes in host memory, on all of the engine's threads.
//
// Two phases with a barrier between them: x in 8 bits, and y = A x for every (group, rank) in turn, split between
// the threads; then for each block of columns out = W x, and out += B y on top while it is in the cache. Blocks are
// disjoint and a row's adapters are added in the order of their ids, so nothing depends on the split.
#include "delta.h"

#include <algorithm>
#include <atomic>

namespace loraproxy {

namespace {

class HostKernel final : public DeltaKernel {
public:
    HostKernel(int n_threads, const Kernels * kernels) : parallel_(n_threads), kernels_(*kernels) {}

    std::string apply(const std::vector<Work> & works) override {
        lay_out(works);
        const ggml_tensor * x          = works[0].node->src[1];
        const BaseProduct * base       = nullptr;
        size_t              n_units    = 0;
        bool                multiplies = false;
        for (const Work & work : works) {
            n_units += units(work);
            base     = work.base ? work.base : base;
            multiplies |= work.target->op == Op::mul_mat;
            if (work.target->op == Op::get_rows) {
                gather(static_cast<const int32_t *>(x->data), work);
            }
        }
        if (base != nullptr) {
            quantized_.resize(static_cast<int>(x->ne[1]), static_cast<int>(x->ne[0]));
        }
        const size_t n_threads = parallel_.size();
        const size_t share     = std::max<size_t>(1, n_units / (n_threads * SHARES));
        next_.store(0, std::memory_order_relaxed);
        parallel_.run([&](int thread) {
            if (multiplies) {
                for (int row = thread; base != nullptr && row < quantized_.n_rows; row += parallel_.size()) {
                    base->quantize(row_of(x, row), quantized_, row);
                }
                down(n_groups_ * thread / static_cast<int>(n_threads), n_groups_ * (thread + 1) / static_cast<int>(n_threads));
                parallel_.barrier();
            }
            for (size_t first; (first = next_.fetch_add(share, std::memory_order_relaxed)) < n_units;) {
                finish(works, first, std::min(first + share, n_units));
            }
        });
        return "";
    }

private:
    static constexpr size_t SHARES = 8; // shares of a thread: one that is held up leaves some to the others

    struct Job {
        const Group *  group;
        const Target * target;
        int            first_group; // of ranks, in the list of all of them
        size_t         first_y;     // its part of y_: (rows, y_stride)
        size_t         first_row;   // its part of x_ and out_
        size_t         y_stride;
    };

    // A unit of the second phase: COLUMNS outputs of one work, for all rows.
    static size_t units(const Work & work) { return blocks_of(static_cast<size_t>(work.target->n_out), COLUMNS); }

    void lay_out(const std::vector<Work> & works) {
        jobs_.clear();
        first_job_.clear();
        size_t n_y = 0, n_rows = 0;
        n_groups_ = 0;
        for (const Work & work : works) {
            first_job_.push_back(jobs_.size());
            for (const Group & group : work.groups) {
                const int groups = static_cast<int>(blocks_of(group.pair->rank, RANKS));
                jobs_.push_back({&group, work.target, n_groups_, n_y, n_rows, static_cast<size_t>(groups) * RANKS});
                n_groups_ += groups;
                n_y       += jobs_.back().y_stride * group.n_rows;
                n_rows    += group.n_rows;
            }
        }
        first_job_.push_back(jobs_.size());
        y_.resize(std::max(y_.size(), n_y));
        x_.resize(n_rows);
        out_.resize(n_rows);
        for (size_t w = 0; w < works.size(); ++w) {
            const ggml_tensor * x = works[w].node->src[1];
            for (size_t j = first_job_[w]; j < first_job_[w + 1]; ++j) {
                for (int i = 0; i < jobs_[j].group->n_rows; ++i) {
                    const int row                 = jobs_[j].group->rows[i];
                    out_[jobs_[j].first_row + i] = row_of(works[w].node, row);
                    x_[jobs_[j].first_row + i]   = works[w].target->op == Op::mul_mat ? row_of(x, row) : nullptr;
                }
            }
        }
    }

    // The units [first, last): the base's product, where it is ours, then the deltas on top.
    void finish(const std::vector<Work> & works, size_t first, size_t last) {
        for (size_t w = 0; w < works.size() && last > 0; ++w) {
            const size_t n = units(works[w]);
            if (first < n) {
                const size_t end = std::min(last, n);
                for (size_t unit = first; unit < end && works[w].base != nullptr; ++unit) {
                    multiply(works[w], unit);
                }
                up(first_job_[w], first_job_[w + 1], static_cast<int>(first), static_cast<int>(end));
            }
            first = first > n ? first - n : 0;
            last  = last > n ? last - n : 0;
        }
    }

    void multiply(const Work & work, size_t unit) {
        const ggml_tensor * w = work.node->src[0];
        const int first_out = static_cast<int>(unit) * COLUMNS;
        const int n_out     = std::min(COLUMNS, static_cast<int>(work.target->n_out) - first_out);
        for (int row = 0; row < quantized_.n_rows; row += BATCH_ROWS) {
            const int n = std::min(BATCH_ROWS, quantized_.n_rows - row);
            for (int j = first_out; j < first_out + n_out; j += TILE_ROWS) {
                float * out[BATCH_ROWS];
                for (int i = 0; i < n; ++i) {
                    out[i] = row_of(work.node, row + i) + j;
                }
                work.base->product(static_cast<const uint8_t *>(w->data) + static_cast<size_t>(j) * w->nb[1], w->nb[1],
                                   std::min(TILE_ROWS, first_out + n_out - j), quantized_, row, n, out);
            }
        }
    }

    static float * row_of(const ggml_tensor * tensor, int row) {
        return reinterpret_cast<float *>(static_cast<char *>(tensor->data) + row * tensor->nb[1]);
    }

    void gather(const int32_t * tokens, const Work & work) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            for (int i = 0; i < job.group->n_rows; ++i) {
                const int32_t token = tokens[job.group->rows[i]];
                const bool    known = token >= 0 && token < work.target->n_in;
                const float   scale = pair.scale * job.group->scales[i];
                float *       y     = y_.data() + job.first_y + i * job.y_stride;
                for (int r = 0; r < pair.rank; ++r) {
                    y[r] = known ? scale * f16_to_f32(pair.a[static_cast<size_t>(token) * pair.rank + r]) : 0.0f;
                }
            }
        }
    }

    // y = scale * A x for the groups of ranks [first, last) of the list of all of them
    void down(int first, int last) {
        for (const Job & job : jobs_) {
            const Pair & pair   = *job.group->pair;
            const int    groups = static_cast<int>(job.y_stride) / RANKS;
            const int    g0     = std::max(first - job.first_group, 0);
            const int    g1     = std::min(last - job.first_group, groups);
            if (g0 >= g1) {
                continue;
            }
            const int n = job.group->n_rows;
            float *   y = y_.data() + job.first_y;
            const int            n_in = static_cast<int>(job.target->n_in);
            const float * const * x   = x_.data() + job.first_row;
            if (pair.a8) {
                kernels_.down8(pair.a8, n_in, x, n, g0, g1, y, job.y_stride);
            } else {
                kernels_.down(pair.a, n_in, x, n, g0, g1, y, job.y_stride);
            }
            for (int i = 0; i < n; ++i) {
                const float scale = pair.scale * job.group->scales[i];
                for (int r = g0 * RANKS; r < g1 * RANKS; ++r) {
                    y[i * job.y_stride + r] *= scale * pair.factor(r);
                }
            }
        }
    }

    // out += B y for the blocks of columns [b0, b1)
    void up(size_t first_job, size_t last_job, int b0, int b1) {
        for (size_t j = first_job; j < last_job; ++j) {
            const Job &  job  = jobs_[j];
            const Pair & pair = *job.group->pair;
            const int     n_out = static_cast<int>(job.target->n_out);
            const float * y     = y_.data() + job.first_y;
            float * const * out = out_.data() + job.first_row;
            if (pair.bt8) {
                kernels_.up8(pair.bt8, pair.rank, n_out, y, job.y_stride, out, job.group->n_rows, b0, b1);
            } else {
                kernels_.up(pair.bt, pair.rank, n_out, y, job.y_stride, out, job.group->n_rows, b0, b1);
            }
        }
    }

    Parallel                  parallel_;
    const Kernels &           kernels_;
    std::vector<Job>           jobs_;
    std::vector<size_t>        first_job_; // of each work
    int                        n_groups_ = 0;
    Activations                quantized_;
    std::atomic<size_t>        next_{0};
    std::vector<float>        y_;
    std::vector<const float *> x_;
    std::vector<float *>      out_;
};

} // namespace

std::unique_ptr<DeltaKernel> make_host_kernel(int n_threads, const char * force) {
    const Kernels * kernels = choose_kernels(force);
    return kernels ? std::make_unique<HostKernel>(n_threads, kernels) : nullptr;
}

} // namespace loraproxy
