#include "pool.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "crowd.h"
#include "seats.h"

namespace {

constexpr auto kSpinBetweenJobs = std::chrono::microseconds(2000);  // waking a thread costs a good part of a pass
constexpr int kSpinsAtBarrier = 4000;  // a few hundred microseconds: yielding to another program costs milliseconds

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t nanoseconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// One of the threads beside the caller's.
struct Worker {
  std::atomic<long> generation{0};  // jobs that it takes part in
  std::mutex sleep;
  std::condition_variable wake;
  bool asleep = false;  // under `sleep`

  void begin_job() {
    std::lock_guard<std::mutex> lock(sleep);
    generation.fetch_add(1, std::memory_order_release);
    if (asleep) wake.notify_one();
  }
};

class SpinningTeam : public Team {
 public:
  int fit(int threads, int rows) override {
    std::lock_guard<std::mutex> one_job(running_);
    return waiting_ == PL_WAIT_AUTO ? crowd_.fit(threads, rows) : threads;
  }

  void run(int threads, const std::function<void(int)>& job, const Fitted& fitted) override {
    std::lock_guard<std::mutex> one_job(running_);
    while ((int)workers_.size() < threads - 1) add_worker();
    job_ = &job;
    size_ = threads;
    // More threads than processors: one that spins keeps another from its work.
    yields_.store(waiting_ == PL_WAIT_SLEEP || threads > usable_processors());
    seats_.take(0);
    arrived_.store(0);
    finished_.store(0);
    lost_ns_.store(0);
    const int64_t begin = nanoseconds(CLOCK_MONOTONIC);
    for (int i = 0; i < threads - 1; i++) workers_[i]->begin_job();
    take_part(0);
    // Every worker is done with this job before the next one may change what they read.
    int spins = 0;
    while (finished_.load(std::memory_order_acquire) < threads - 1) pause(spins);
    if (!fitted.rows || waiting_ != PL_WAIT_AUTO) return;
    const double took = 1e-9 * (double)(nanoseconds(CLOCK_MONOTONIC) - begin);
    crowd_.observe(threads, fitted.wanted_threads, fitted.rows, took, 1e-9 * (double)lost_ns_.load() / threads);
  }

  void barrier() override {
    if (size_ == 1) return;
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    int spins = 0;
    while (round_.load(std::memory_order_acquire) == round) pause(spins);
  }

  int last_size() const override { return size_; }
  void set_waiting(int how) override {
    std::lock_guard<std::mutex> one_job(running_);
    waiting_ = how;
    crowd_ = Crowd();
  }

 private:
  void add_worker() {
    workers_.push_back(std::make_unique<Worker>());
    Worker* worker = workers_.back().get();
    const int index = (int)workers_.size();
    std::thread([this, worker, index] { work(*worker, index); }).detach();
  }

  // Runs the job, and adds up how long this thread was kept from its processor.
  void take_part(int thread) {
    const int64_t wall = nanoseconds(CLOCK_MONOTONIC), own = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    (*job_)(thread);
    const int64_t worked = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - own;
    lost_ns_.fetch_add(std::max<int64_t>(0, nanoseconds(CLOCK_MONOTONIC) - wall - worked), std::memory_order_relaxed);
  }

  void pause(int& spins) {
    if (!yields_.load(std::memory_order_relaxed) && ++spins < kSpinsAtBarrier) relax();
    else sched_yield();
  }

  void work(Worker& worker, int index) {
    for (long seen = 0;; seen++) {
      wait_for_job(worker, seen);
      seats_.take(index);
      take_part(index);
      finished_.fetch_add(1, std::memory_order_release);
    }
  }

  void wait_for_job(Worker& worker, long seen) {
    const auto begun = [&] { return worker.generation.load(std::memory_order_acquire) != seen; };
    const auto start = std::chrono::steady_clock::now();
    while (!yields_.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() - start < kSpinBetweenJobs) {
      for (int i = 0; i < 32; i++) {
        if (begun()) return;
        relax();
      }
    }
    std::unique_lock<std::mutex> lock(worker.sleep);
    worker.asleep = true;
    worker.wake.wait(lock, begun);
    worker.asleep = false;
  }

  Seats seats_;
  Crowd crowd_;
  std::mutex running_;
  std::vector<std::unique_ptr<Worker>> workers_;
  const std::function<void(int)>* job_ = nullptr;
  int size_ = 1, waiting_ = PL_WAIT_AUTO;
  std::atomic<int> finished_{0};
  std::atomic<bool> yields_{false};
  std::atomic<int64_t> lost_ns_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

}  // namespace

Team& team() {
  static std::mutex guard;
  static SpinningTeam* current = nullptr;  // never destroyed: its threads may outlive main
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(guard);
  if (owner != getpid()) {
    current = new SpinningTeam;
    owner = getpid();
  }
  return *current;
}
