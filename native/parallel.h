// One parallel region over the engine's threads.
//
// Where ggml runs its graphs with OpenMP, so do we, with the same number of threads: libgomp then hands both
// the same pool, and no thread of ours competes with one of ggml's that still spins at the end of a graph.
// Without OpenMP (macOS) a small pool of our own waits on a condition variable.
#pragma once

#include <functional>
#include <memory>

namespace loraproxy {

class Parallel {
public:
    explicit Parallel(int n_threads);
    ~Parallel();

    int size() const { return n_threads_; }

    // Calls work(thread) for thread = 0 .. size() - 1, at the same time, and returns when all are done.
    void run(const std::function<void(int)> & work);

    // Inside run(): waits until every thread has come here.
    void barrier();

private:
    int n_threads_;
    struct Pool;
    std::unique_ptr<Pool> pool_;
};

} // namespace loraproxy
