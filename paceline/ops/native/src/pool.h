// A team of threads that runs one function together, and meets at barriers inside it.
//
// Waiting spins first, because the gaps inside a pass are a few microseconds, and yields or sleeps later, because the
// gaps between passes are not: an idle team costs nothing. While a thread spins between two jobs it fetches what the next
// one will read.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

// What a kind of job reads first, in the order in which it reads it. The team sees which kind follows which.
struct Reading {
  struct Span {
    const uint8_t* at;
    size_t bytes;
  };
  std::vector<Span> spans;
  const Reading* next = nullptr;  // what ran after it the last time; the team's

  Reading() = default;
  ~Reading();  // the team forgets it
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  // Adds memory at the end; what lies just behind the last span makes that one longer.
  void add(const uint8_t* at, size_t bytes);
};

// How threads wait: PL_WAIT_AUTO leaves threads out where others take their processors and fewer are faster; the others
// are for measuring.
enum PlWaiting { PL_WAIT_AUTO = 0, PL_WAIT_SPIN = 1, PL_WAIT_SLEEP = 2 };

// What the team should know of a job, if anything: what it reads, and what `fit` was asked, so that its time counts there.
struct JobKind {
  Reading* reading = nullptr;
  int wanted_threads = 0, rows = 0;
};

class Team {
 public:
  virtual ~Team() = default;
  // How many of these threads should run a job of so many rows: fewer than asked for where others need the processors.
  virtual int fit(int threads, int rows) = 0;
  // Runs job(thread) on `threads` threads, the caller being thread 0. One job at a time; others queue up.
  virtual void run(int threads, const std::function<void(int)>& job, const JobKind& kind = {}) = 0;
  // Called by every thread of the running job.
  virtual void barrier() = 0;
  virtual int last_size() const = 0;  // threads of the last job
  virtual void set_waiting(int how) = 0;
  virtual void set_read_ahead(int64_t most_bytes) = 0;  // 0: nothing; below: what the machine suggests
  virtual void forget(const Reading* reading) = 0;
};

// The process's team; a forked child gets a new one, because threads do not survive a fork.
Team& team();
