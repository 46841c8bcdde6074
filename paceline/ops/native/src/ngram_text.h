// A growing text in which the places where its n-grams ended are found in constant time: the twin of
// paceline/spec/lookup/ngram_index.py, which says how.
//
// A slot of a table knows its n-gram only as a place in the text: equality is decided there, so hashes may collide.
// Between two drafts a model's weights pass through the caches, so every slot is asked for before the first is read.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int kMaxSizes = 16;

struct Slot {
  uint32_t hash = 0;
  int32_t place = -1;  // where the n-gram last ended; -1: free
};

struct Table {
  std::vector<Slot> slots = std::vector<Slot>(16);  // a power of two of them, linear probing
  size_t used = 0;

  Slot& at(size_t i) { return slots[i & (slots.size() - 1)]; }
  void prefetch(uint32_t hash) { __builtin_prefetch(&at(hash)); }

  // Room for `more` n-grams, at most three quarters full with them.
  void reserve(size_t more) {
    size_t size = slots.size();
    while (4 * (used + more) > 3 * size) size *= 2;
    if (size == slots.size()) return;
    std::vector<Slot> larger(size);
    slots.swap(larger);
    for (const Slot& slot : larger) {
      if (slot.place < 0) continue;
      size_t i = slot.hash;
      while (at(i).place >= 0) i++;
      at(i) = slot;
    }
  }
};

struct PlText {
  std::vector<int32_t> sizes;  // ascending
  std::vector<Table> tables;   // one for each size
  std::vector<int32_t> tokens;
  std::vector<int32_t> older;  // [places][sizes]: the earlier place with the same n-gram, or -1
  int32_t end = 0;             // places [0, end) are indexed: never the last token, so something follows each of them

  // Hashes of the n-grams that end at `place`, by size; returns how many sizes fit.
  int hash_back(int32_t place, uint32_t* hashes) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    int32_t taken = 0;
    size_t k = 0;
    for (; k < sizes.size() && sizes[k] <= place + 1; k++) {
      for (; taken < sizes[k]; taken++) hash = (hash ^ (uint32_t)tokens[place - taken]) * 0xd6e8feb86659fd93;
      hashes[k] = (uint32_t)(hash >> 32);
    }
    return (int)k;
  }

  // The slot of the n-gram of size k whose last token is *last, or the free one where it belongs.
  Slot& find(int k, uint32_t hash, const int32_t* last) {
    const int32_t n = sizes[k];
    for (size_t i = hash;; i++) {
      Slot& slot = tables[k].at(i);
      if (slot.place < 0) return slot;
      if (slot.hash == hash && !memcmp(&tokens[slot.place] - (n - 1), last - (n - 1), (size_t)n * 4)) return slot;
    }
  }

  // Append, and index all places but the last. Where memory is missing, nothing has been appended.
  void extend(const int32_t* added, int32_t count) {
    if (count <= 0) return;
    const size_t num_tokens = tokens.size() + count;
    for (Table& table : tables) table.reserve(num_tokens - 1 - end);
    older.resize(num_tokens * sizes.size());
    tokens.insert(tokens.end(), added, added + count);
    for (const int32_t last = (int32_t)num_tokens - 1; end < last;) index_some(last);
  }

  void index_some(int32_t limit) {
    constexpr int kPlaces = 8;
    uint32_t hashes[kPlaces][kMaxSizes];
    int num_fit[kPlaces];
    const int count = limit - end < kPlaces ? limit - end : kPlaces;
    for (int i = 0; i < count; i++) {
      num_fit[i] = hash_back(end + i, hashes[i]);
      for (int k = 0; k < num_fit[i]; k++) tables[k].prefetch(hashes[i][k]);
    }
    for (int i = 0; i < count; i++, end++) {
      int32_t* links = &older[(size_t)end * sizes.size()];
      for (int k = 0; k < num_fit[i]; k++) {
        Slot& slot = find(k, hashes[i][k], &tokens[end]);
        tables[k].used += slot.place < 0;
        links[k] = slot.place;
        slot = {hashes[i][k], end};
      }
      for (size_t k = num_fit[i]; k < sizes.size(); k++) links[k] = -1;
    }
  }
};
