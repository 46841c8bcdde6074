// Where the threads of a team run.
#pragma once
#include <sched.h>

#include <atomic>
#include <thread>

// On how many processors this process may run.
inline int usable_processors() {
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
