// The delta of one node in host memory, on all of the engine's threads.
//
// Two phases with a barrier between them: y = A x for every (group, rank) in turn, split evenly between the
// threads; then out += B y, each thread taking its own columns of every row. Columns are disjoint and a row's
// adapters are added in the order of their ids, so nothing depends on the split.
#include "delta.h"

#include <algorithm>

namespace loraproxy {

namespace {

class HostKernel final : public DeltaKernel {
public:
    HostKernel(int n_threads, const Kernels * kernels) : parallel_(n_threads), kernels_(*kernels) {}

    std::string apply(ggml_tensor * node, const Target & target, int, const std::vector<Group> & groups) override {
        const ggml_tensor * x = node->src[1];
        jobs_.clear();
        size_t n_y = 0, n_rows = 0;
        int    n_ranks = 0;
        for (const Group & group : groups) {
            jobs_.push_back({&group, n_ranks, n_y, n_rows});
            n_ranks += group.pair->rank;
            n_y     += group.pair->rank * group.n_rows;
            n_rows  += group.n_rows;
        }
        y_.resize(std::max(y_.size(), n_y));
        x_.resize(n_rows);
        out_.resize(n_rows);
        for (const Job & job : jobs_) {
            for (int i = 0; i < job.group->n_rows; ++i) {
                const int row             = job.group->rows[i];
                out_[job.first_row + i]   = row_of(node, row);
                x_[job.first_row + i]     = target.op == Op::mul_mat ? row_of(x, row) : nullptr;
            }
        }
        if (target.op == Op::get_rows) {
            gather(static_cast<const int32_t *>(x->data), target);
        }
        const int n_threads = parallel_.size();
        parallel_.run([&](int thread) {
            if (target.op == Op::mul_mat) {
                down(target, n_ranks * thread / n_threads, n_ranks * (thread + 1) / n_threads);
                parallel_.barrier();
            }
            const int blocks = static_cast<int>((target.n_out + COLUMNS - 1) / COLUMNS);
            const int j0     = blocks * thread / n_threads * COLUMNS;
            const int j1     = std::min<int>(target.n_out, blocks * (thread + 1) / n_threads * COLUMNS);
            if (j0 < j1) {
                up(target, j0, j1);
            }
        });
        return "";
    }

private:
    static constexpr int COLUMNS = 32; // a cache line of f16 weights, and whole vectors on every processor

    struct Job {
        const Group * group;
        int           first_rank; // in the node's list of all ranks
        size_t        first_y;    // its part of y_: (rows, rank)
        size_t        first_row;  // its part of x_ and out_
    };

    static float * row_of(const ggml_tensor * tensor, int row) {
        return reinterpret_cast<float *>(static_cast<char *>(tensor->data) + row * tensor->nb[1]);
    }

    void gather(const int32_t * tokens, const Target & target) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            float *      y    = y_.data() + job.first_y;
            for (int i = 0; i < job.group->n_rows; ++i) {
                const int32_t token = tokens[job.group->rows[i]];
                const float   scale = pair.scale * job.group->scales[i];
                for (int r = 0; r < pair.rank; ++r) {
                    const bool known = token >= 0 && token < target.n_in;
                    y[static_cast<size_t>(i) * pair.rank + r] = known ? scale * f16_to_f32(pair.a[static_cast<size_t>(token) * pair.rank + r]) : 0.0f;
                }
            }
        }
    }

    // y = scale * A x for the ranks [first, last) of the node's list
    void down(const Target & target, int first, int last) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            const int    r0   = std::max(first - job.first_rank, 0);
            const int    r1   = std::min(last - job.first_rank, pair.rank);
            if (r0 >= r1) {
                continue;
            }
            const int n = job.group->n_rows;
            float *   y = y_.data() + job.first_y;
            kernels_.down(pair.a.data(), target.n_in, static_cast<int>(target.n_in), x_.data() + job.first_row, n, r0, r1,
                          y, pair.rank);
            for (int i = 0; i < n; ++i) {
                const float scale = pair.scale * job.group->scales[i];
                for (int r = r0; r < r1; ++r) {
                    y[static_cast<size_t>(i) * pair.rank + r] *= scale;
                }
            }
        }
    }

    void up(const Target & target, int j0, int j1) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            kernels_.up(pair.bt.data(), target.n_out, pair.rank, y_.data() + job.first_y, pair.rank,
                        out_.data() + job.first_row, job.group->n_rows, j0, j1);
        }
    }

    Parallel                  parallel_;
    const Kernels &           kernels_;
    std::vector<Job>          jobs_;
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
