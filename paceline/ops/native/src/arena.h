// Memory for packed weights: large, aligned to cache lines, on huge pages where the system gives them.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (auto& chunk : chunks_) munmap(chunk.base, chunk.size);
  }

  // Zeroed. Keeps a page after the last byte, so that kernels may prefetch past the end without a thought.
  uint8_t* allocate(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || chunks_.back().used + bytes > chunks_.back().size - 4096) grow(bytes + 4096);
    Chunk& chunk = chunks_.back();
    uint8_t* at = (uint8_t*)chunk.base + chunk.used;
    chunk.used += bytes;
    total_ += bytes;
    return at;
  }
  size_t total() const { return total_; }

 private:
  struct Chunk {
    void* base;
    size_t size, used;
  };
  void grow(size_t at_least) {
    const size_t huge = (size_t)2 << 20, wanted = at_least > ((size_t)32 << 20) ? at_least : ((size_t)32 << 20);
    const size_t size = (wanted + huge - 1) / huge * huge;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(base, size, MADV_HUGEPAGE);
#endif
    chunks_.push_back({base, size, 0});
  }
  std::vector<Chunk> chunks_;
  size_t total_ = 0;
};
