// How many threads to use beside other programs.
//
// A thread that loses its processor keeps the whole team waiting at the next barrier, for as long as a time slice. Whether
// fewer threads are faster then depends on the job: one row is read from memory at nearly the same speed by one thread,
// a prompt is computed twice as fast by two. So both are timed, by the size of the job, as long as time is being lost.
#pragma once
#include <algorithm>

class Crowd {
 public:
  // How many of `threads` to use for a job of so many rows.
  int fit(int threads, int rows) {
    Kind& kind = kinds_[kind_of(rows)];
    if (threads < 2 || (!kind.fewer_is_better && kind.lost_share < kCrowded)) return threads;
    // Runs of jobs, so that what the caches hold and where threads sit is that of the same choice.
    const bool trial = kind.count++ % kPeriod < kTrial;
    return trial != kind.fewer_is_better ? threads - 1 : threads;
  }

  // A job took `seconds`, of which its threads were kept from their processors for `lost` (a mean over the threads).
  void observe(int threads, int wanted, int rows, double seconds, double lost) {
    Kind& kind = kinds_[kind_of(rows)];
    const double each = seconds / rows;
    double& mean = threads < wanted ? kind.fewer_s : kind.all_s;
    mean = mean == 0.0 ? each : mean + (each - mean) / kMemory;
    if (threads == wanted) kind.lost_share += (std::min(1.0, lost / seconds) - kind.lost_share) / kMemory;
    kind.fewer_is_better = kind.fewer_s > 0.0 && kind.fewer_s < kind.all_s;
    if (!kind.fewer_is_better && kind.lost_share < kCrowded) kind.fewer_s = 0.0;  // a quiet machine: try again next time
  }

 private:
  static constexpr double kCrowded = 0.05;  // share of lost time from which fewer threads are tried; quiet: below 0.01
  static constexpr double kMemory = 16.0;   // jobs; a time slice lost in one of them is a few jobs long
  static constexpr int kPeriod = 64, kTrial = 4;  // the worse choice is tried in 4 of 64 jobs
  struct Kind {
    double all_s = 0.0, fewer_s = 0.0, lost_share = 0.0;  // seconds a row
    bool fewer_is_better = false;
    int count = 0;
  };
  static int kind_of(int rows) {
    int bits = 0;
    while (rows > 1 && bits < kKinds - 1) rows >>= 1, bits++;
    return bits;
  }
  static constexpr int kKinds = 12;
  Kind kinds_[kKinds];
};
