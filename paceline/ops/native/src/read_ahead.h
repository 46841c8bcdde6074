// What the threads fetch while they wait for the next job.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "pool.h"

// How much is worth fetching before it is needed: half of the last cache, for the host works in it too.
inline size_t most_read_ahead() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return (size_t)bytes / 2;
#endif
  return (size_t)4 << 20;
}

// What is read after `reading`, and after that, each kind once.
inline std::vector<Reading::Span> plan_after(const Reading* reading, size_t left) {
  std::vector<Reading::Span> spans;
  const Reading* first = reading->next;
  constexpr int kMostKinds = 4;  // a pass and the parts of a draft
  const Reading* next = first;
  for (int i = 0; i < kMostKinds && next; i++, next = next->next) {
    for (const Reading::Span& span : next->spans) {
      const size_t bytes = std::min(span.bytes, left);
      if (bytes) spans.push_back({span.at, bytes});
      left -= bytes;
    }
    if (next == reading || next->next == first) break;
  }
  return spans;
}

// A worker's plans: the next one is written while the current one may still be followed.
struct Plans {
  std::vector<Reading::Span> spans[2];
  int current = 0;
  void set(std::vector<Reading::Span> next) {
    spans[1 - current] = std::move(next);
    current = 1 - current;
  }
};

// A worker's place in its plan: it fetches a little of it between two looks at whether there is work.
class Ahead {
 public:
  void follow(const Plans& plans) {
    if (plans.current == plan_) return;
    plan_ = plans.current;
    span_ = at_ = 0;
  }
  // False: nothing is left to fetch.
  bool step(const Plans& plans) {
    const auto& spans = plans.spans[plan_];
    if (span_ >= spans.size()) return false;
    constexpr size_t kLine = 64, kLines = 16;
    for (size_t i = 0; i < kLines && at_ < spans[span_].bytes; i++, at_ += kLine)
      __builtin_prefetch(spans[span_].at + at_, 0, 2);
    if (at_ >= spans[span_].bytes) span_++, at_ = 0;
    return true;
  }

 private:
  int plan_ = 0;
  size_t span_ = 0, at_ = 0;
};
