#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

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

// On how many processors this process may run.
int usable_processors() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (!sched_getaffinity(0, sizeof allowed, &allowed)) return CPU_COUNT(&allowed);
#endif
  return (int)std::thread::hardware_concurrency();
}

// A woken thread often lands on the processor of the one that woke it, and on a busy machine stays there: then the team
// takes turns on one core. So a thread that finds itself beside an earlier one moves away, once, and is free again.
class Seats {
 public:
  void take(int thread) {
#if defined(__linux__)
    if (thread >= kMost) return;
    int here = sched_getcpu();
    bool shared = false;
    for (int other = 0; other < thread; other++) shared |= cpu_[other].load(std::memory_order_relaxed) == here;
    if (shared) here = move_away(thread);
    cpu_[thread].store(here, std::memory_order_relaxed);
#else
    (void)thread;
#endif
  }

#if defined(__linux__)
 private:
  static constexpr int kMost = 256;
  int move_away(int thread) {
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return sched_getcpu();
    free = allowed;
    for (int other = 0; other < thread; other++) {
      const int taken = cpu_[other].load(std::memory_order_relaxed);
      if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
    }
    if (CPU_COUNT(&free) > 0 && !sched_setaffinity(0, sizeof free, &free))
      sched_setaffinity(0, sizeof allowed, &allowed);
    return sched_getcpu();
  }
  std::atomic<int> cpu_[kMost] = {};
#endif
};

class SpinningTeam : public Team {
 public:
  void run(int threads, const std::function<void(int)>& job) override {
    std::lock_guard<std::mutex> one_job(running_);
    while ((int)workers_.size() < threads - 1) {
      const int index = (int)workers_.size() + 1;
      workers_.emplace_back([this, index, seen = generation_.load()]() mutable { work(index, seen); });
      workers_.back().detach();
    }
    job_ = &job;
    size_ = threads;
    crowded_.store(threads > usable_processors());
    seats_.take(0);
    arrived_.store(0);
    finished_.store(0);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      generation_.fetch_add(1);
    }
    if (sleepers_.load() > 0) wake_.notify_all();
    job(0);
    // Every worker has seen this generation before the next job may change what they read.
    int spins = 0;
    while (finished_.load(std::memory_order_acquire) < (int)workers_.size()) pause(spins);
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

 private:
  void pause(int& spins) {
    if (!crowded_.load(std::memory_order_relaxed) && ++spins < kSpinsAtBarrier) relax();
    else sched_yield();
  }

  void work(int index, long seen) {
    for (;;) {
      wait_for_job(seen);
      seen++;
      if (index < size_) {
        seats_.take(index);
        (*job_)(index);
      }
      finished_.fetch_add(1, std::memory_order_release);
    }
  }

  void wait_for_job(long seen) {
    const auto start = std::chrono::steady_clock::now();
    while (!crowded_.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() - start < kSpinBetweenJobs) {
      for (int i = 0; i < 32; i++) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  Seats seats_;
  std::mutex running_, sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  int size_ = 1;
  std::atomic<long> generation_{0};
  std::atomic<int> sleepers_{0}, finished_{0};
  std::atomic<bool> crowded_{false};  // more threads than processors: one that spins keeps another from its work
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
