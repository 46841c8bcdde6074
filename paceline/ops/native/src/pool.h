// A team of threads that runs one function together, and meets at barriers inside it.
//
// Waiting spins first, because the gaps inside a pass are a few microseconds, and yields or sleeps later, because the
// gaps between passes are not: an idle team costs nothing.
#pragma once
#include <atomic>
#include <functional>

class Team {
 public:
  virtual ~Team() = default;
  // Runs job(thread) on `threads` threads, the caller being thread 0. One job at a time; others queue up.
  virtual void run(int threads, const std::function<void(int)>& job) = 0;
  // Called by every thread of the running job.
  virtual void barrier() = 0;
};

// The process's team; a forked child gets a new one, because threads do not survive a fork.
Team& team();
