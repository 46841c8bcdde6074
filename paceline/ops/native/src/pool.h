// A team of threads that runs one function together, and meets at barriers inside it.
//
// Waiting spins first, because the gaps inside a pass are a few microseconds, and yields or sleeps later, because the
// gaps between passes are not: an idle team costs nothing.
#pragma once
#include <atomic>
#include <functional>

// How threads wait: PL_WAIT_AUTO leaves threads out where others take their processors and fewer are faster; the others
// are for measuring.
enum PlWaiting { PL_WAIT_AUTO = 0, PL_WAIT_SPIN = 1, PL_WAIT_SLEEP = 2 };

// What `fit` was asked for a job, so that its time counts there.
struct Fitted {
  int wanted_threads = 0, rows = 0;
};

class Team {
 public:
  virtual ~Team() = default;
  // How many of these threads should run a job of so many rows: fewer than asked for where others need the processors.
  virtual int fit(int threads, int rows) = 0;
  // Runs job(thread) on `threads` threads, the caller being thread 0. One job at a time; others queue up.
  virtual void run(int threads, const std::function<void(int)>& job, const Fitted& fitted = {}) = 0;
  // Called by every thread of the running job.
  virtual void barrier() = 0;
  virtual int last_size() const = 0;  // threads of the last job
  virtual void set_waiting(int how) = 0;
};

// The process's team; a forked child gets a new one, because threads do not survive a fork.
Team& team();
