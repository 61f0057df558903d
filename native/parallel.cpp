#include "parallel.h"

#ifdef _OPENMP

#include <omp.h>

namespace loraproxy {

struct Parallel::Pool {};

Parallel::Parallel(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads) {}
Parallel::~Parallel() = default;

void Parallel::run(const std::function<void(int)> & work) {
    if (n_threads_ == 1) {
        work(0);
        return;
    }
#pragma omp parallel num_threads(n_threads_)
    work(omp_get_thread_num());
}

void Parallel::barrier() {
    if (n_threads_ > 1) {
#pragma omp barrier
    }
}

} // namespace loraproxy

#else

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace loraproxy {

struct Parallel::Pool {
    std::mutex                        mutex;
    std::condition_variable           start;
    std::vector<std::thread>          threads;
    const std::function<void(int)> *  work = nullptr;
    uint64_t                          generation = 0;
    bool                              stop = false;
    std::atomic<int>                  running{0};
    std::atomic<int>                  arrived{0};
    std::atomic<int>                  phase{0};

    void loop(int thread) {
        uint64_t seen = 0;
        for (;;) {
            const std::function<void(int)> * job;
            {
                std::unique_lock<std::mutex> lock(mutex);
                start.wait(lock, [&] { return stop || generation != seen; });
                if (stop) {
                    return;
                }
                seen = generation;
                job  = work;
            }
            (*job)(thread);
            running.fetch_sub(1, std::memory_order_release);
        }
    }
};

Parallel::Parallel(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads), pool_(new Pool) {
    for (int i = 1; i < n_threads_; ++i) {
        pool_->threads.emplace_back([this, i] { pool_->loop(i); });
    }
}

Parallel::~Parallel() {
    {
        std::lock_guard<std::mutex> lock(pool_->mutex);
        pool_->stop = true;
    }
    pool_->start.notify_all();
    for (auto & thread : pool_->threads) {
        thread.join();
    }
}

void Parallel::run(const std::function<void(int)> & work) {
    if (n_threads_ > 1) {
        std::lock_guard<std::mutex> lock(pool_->mutex);
        pool_->work = &work;
        pool_->running.store(n_threads_ - 1, std::memory_order_relaxed);
        ++pool_->generation;
    }
    pool_->start.notify_all();
    work(0);
    while (pool_->running.load(std::memory_order_acquire) != 0) {
        std::this_thread::yield();
    }
}

void Parallel::barrier() {
    const int phase = pool_->phase.load(std::memory_order_relaxed);
    if (pool_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads_) {
        pool_->arrived.store(0, std::memory_order_relaxed);
        pool_->phase.store(phase + 1, std::memory_order_release);
        return;
    }
    while (pool_->phase.load(std::memory_order_acquire) == phase) {
        std::this_thread::yield();
    }
}

} // namespace loraproxy

#endif
