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
        int    n_groups = 0;
        for (const Group & group : groups) {
            jobs_.push_back({&group, n_groups, n_y, n_rows, blocks_of(group.pair->rank, RANKS) * RANKS});
            n_groups += static_cast<int>(blocks_of(group.pair->rank, RANKS));
            n_y      += jobs_.back().y_stride * group.n_rows;
            n_rows   += group.n_rows;
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
                down(target, n_groups * thread / n_threads, n_groups * (thread + 1) / n_threads);
                parallel_.barrier();
            }
            const int blocks = static_cast<int>(blocks_of(target.n_out, COLUMNS));
            up(target, blocks * thread / n_threads, blocks * (thread + 1) / n_threads);
        });
        return "";
    }

private:
    struct Job {
        const Group * group;
        int           first_group; // of ranks, in the node's list of all of them
        size_t        first_y;     // its part of y_: (rows, y_stride)
        size_t        first_row;   // its part of x_ and out_
        size_t        y_stride;
    };

    static float * row_of(const ggml_tensor * tensor, int row) {
        return reinterpret_cast<float *>(static_cast<char *>(tensor->data) + row * tensor->nb[1]);
    }

    void gather(const int32_t * tokens, const Target & target) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            for (int i = 0; i < job.group->n_rows; ++i) {
                const int32_t token = tokens[job.group->rows[i]];
                const bool    known = token >= 0 && token < target.n_in;
                const float   scale = pair.scale * job.group->scales[i];
                float *       y     = y_.data() + job.first_y + i * job.y_stride;
                for (int r = 0; r < pair.rank; ++r) {
                    y[r] = known ? scale * f16_to_f32(pair.a[static_cast<size_t>(token) * pair.rank + r]) : 0.0f;
                }
            }
        }
    }

    // y = scale * A x for the groups of ranks [first, last) of the node's list
    void down(const Target & target, int first, int last) {
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
            kernels_.down(pair.a, static_cast<int>(target.n_in), x_.data() + job.first_row, n, g0, g1, y, job.y_stride);
            for (int i = 0; i < n; ++i) {
                const float scale = pair.scale * job.group->scales[i];
                for (int r = g0 * RANKS; r < g1 * RANKS; ++r) {
                    y[i * job.y_stride + r] *= scale;
                }
            }
        }
    }

    // out += B y for the blocks of columns [b0, b1)
    void up(const Target & target, int b0, int b1) {
        for (const Job & job : jobs_) {
            const Pair & pair = *job.group->pair;
            kernels_.up(pair.bt, pair.rank, static_cast<int>(target.n_out), y_.data() + job.first_y, job.y_stride,
                        out_.data() + job.first_row, job.group->n_rows, b0, b1);
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
