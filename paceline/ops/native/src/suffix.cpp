// Drafts of the `suffix` method, one call each: the twin of paceline/spec/lookup/suffix_trees.py, which says what is done and
// why. Same places, same sums in the same order: the trees are the same to the bit.
// paceline/ops/native/suffix.py declares this interface again for ctypes.
#include <algorithm>
#include <cmath>
#include <memory>

#include "ngram_text.h"

extern "C" {

struct PlSuffixDraft {
  int32_t max_match, num_chunks;
  double factor, min_prob;
  const double *hits, *guesses;              // [max_match + 1]: by the length of a match
  PlText* const* chunks;                     // past outputs
  int32_t *token_ids, *parents, *lengths;    // [num_nodes], out
  double* confidence;                        // [num_nodes], out
};

enum PlSuffixStatus { PL_SUFFIX_NO_PLACE = -1, PL_SUFFIX_NO_MEMORY = -2 };
}

namespace {

// As in suffix_trees.py
constexpr int32_t kSeparator = -1;
constexpr int kMaxPlaces = 8, kMaxFullMatches = 3, kMaxShorter = 3;

struct Place {
  const int32_t* next;  // what followed there
  int32_t period;       // tokens until the end of the text, where it goes round again
  int32_t length;       // tokens of the continuation
  int32_t match;
  double weight;

  int32_t token(int32_t i) const { return next[i < period ? i : i % period]; }
};

struct Offer {
  double path, chance;
  int32_t tie, parent, depth, token, length;
  uint32_t first_voter, num_voters;
};

// Likeliest first. Two offers differ in (parent, token), so the order is total.
bool comes_later(const Offer& a, const Offer& b) {
  if (a.path != b.path) return a.path < b.path;
  if (a.tie != b.tie) return a.tie > b.tie;
  if (a.parent != b.parent) return a.parent > b.parent;
  return a.token > b.token;
}

struct Vote {
  int32_t token;
  double weight;
  uint32_t num_voters, end;  // voters[.. end) written so far
};

// Kept between calls for its memory.
struct Scratch {
  std::vector<Place> places;
  std::vector<Offer> heap;
  std::vector<uint32_t> voters;   // places that vote for an offer, those of each offer in a row
  std::vector<uint32_t> vote_of;  // by voter of the offer at hand
  std::vector<Vote> votes;
};

constexpr uint32_t kNoVote = UINT32_MAX;

class Drafting {
 public:
  Drafting(const PlSuffixDraft& call, PlText& own, int32_t num_nodes, int32_t max_depth, Scratch& scratch)
      : call_(call), own_(own), num_nodes_(num_nodes), max_depth_(max_depth), s_(scratch) {
    s_.places.clear();
    s_.heap.clear();
    s_.voters.clear();
  }

  bool find_places() {
    if (own_.tokens.empty()) return false;
    const int32_t last = (int32_t)own_.tokens.size() - 1;
    suffix_end_ = &own_.tokens[last];
    suffix_length_ = std::min(last + 1, call_.max_match);
    num_sizes_ = own_.hash_back(last, hashes_);
    for (int i = -1; i < call_.num_chunks; i++) {
      for (int k = 0; k < num_sizes_; k++) text(i).tables[k].prefetch(hashes_[k]);
    }
    for (int i = -1; i < call_.num_chunks; i++) find_places_in(text(i));
    return !s_.places.empty();
  }

  int32_t unfold() {
    s_.voters.resize(s_.places.size());
    for (size_t i = 0; i < s_.places.size(); i++) s_.voters[i] = (uint32_t)i;
    offer(-1, 1, 1.0, 0, (uint32_t)s_.places.size());
    int32_t node = 0;
    for (; node < num_nodes_ && !s_.heap.empty(); node++) {
      std::pop_heap(s_.heap.begin(), s_.heap.end(), comes_later);
      const Offer best = s_.heap.back();
      s_.heap.pop_back();
      call_.token_ids[node] = best.token;
      call_.parents[node] = best.parent;
      call_.confidence[node] = best.chance;
      call_.lengths[node] = best.length;
      if (best.depth < max_depth_) offer(node, best.depth + 1, best.path, best.first_voter, best.num_voters);
    }
    return node;
  }

 private:
  PlText& text(int i) const { return i < 0 ? own_ : *call_.chunks[i]; }

  void find_places_in(PlText& text) {
    int32_t seen[kMaxPlaces];
    int num_seen = 0, num_full = 0;
    for (int k = num_sizes_ - 1; k >= 0; k--) {
      const int32_t n = text.sizes[k];
      if (n < longest_ - kMaxShorter) return;
      int32_t place = text.find(k, hashes_[k], suffix_end_).place;
      for (; place >= 0; place = text.older[(size_t)place * text.sizes.size() + k]) {
        if (std::find(seen, seen + num_seen, place) != seen + num_seen) continue;
        if (n < longest_ - kMaxShorter) return;
        seen[num_seen++] = place;
        if (text.tokens[place + 1] != kSeparator) num_full += add_place(text, place + 1, n) == suffix_length_;
        if (num_full == kMaxFullMatches || num_seen == kMaxPlaces) return;
      }
    }
  }

  // Returns the length of the match; `known` tokens of it are known.
  int32_t add_place(const PlText& text, int32_t start, int32_t known) {
    const int32_t* next = text.tokens.data() + start;
    const int32_t most = std::min(suffix_length_, start);
    int32_t match = known;
    while (match < most && next[-1 - match] == suffix_end_[-match]) match++;
    longest_ = std::max(longest_, match);
    const int32_t period = (int32_t)text.tokens.size() - start;
    const int32_t* limit = next + std::min(period, max_depth_);
    const int32_t* stop = std::find(next, limit, kSeparator);
    const int32_t length = stop < limit ? (int32_t)(stop - next) : max_depth_;
    s_.places.push_back({next, period, length, match, std::ldexp(1.0, match)});
    return match;
  }

  // Offer the children of `parent`: one for each token that a place votes for.
  void offer(int32_t parent, int32_t depth, double prob, uint32_t first, uint32_t count) {
    int32_t longest = 0;
    const double total = count_votes(depth, first, count, &longest);
    if (depth > 1 && depth > std::trunc(call_.factor * longest)) return;
    const int32_t length = std::min(longest + depth - 1, call_.max_match);
    const double rate = call_.hits[length] / call_.guesses[length];
    list_voters(first, count);
    for (const Vote& vote : s_.votes) {
      const double chance = s_.votes.size() == 1 ? rate : rate * vote.weight / total;
      const double path = prob * chance;
      if (!(path >= call_.min_prob)) continue;
      const int32_t tie = (int32_t)s_.heap.size();
      const uint32_t begin = vote.end - vote.num_voters;
      s_.heap.push_back({path, chance, tie, parent, depth, vote.token, length, begin, vote.num_voters});
      std::push_heap(s_.heap.begin(), s_.heap.end(), comes_later);
    }
  }

  // Fills votes, in the order in which their first voters come; returns the weight of all.
  double count_votes(int32_t depth, uint32_t first, uint32_t count, int32_t* longest) {
    s_.votes.clear();
    s_.vote_of.assign(count, kNoVote);
    double total = 0.0;
    for (uint32_t i = 0; i < count; i++) {
      const Place& place = s_.places[s_.voters[first + i]];
      if (place.length < depth) continue;
      *longest = std::max(*longest, place.match);
      total += place.weight;
      const int32_t token = place.token(depth - 1);
      uint32_t v = 0;
      while (v < s_.votes.size() && s_.votes[v].token != token) v++;
      if (v == s_.votes.size()) s_.votes.push_back({token, 0.0, 0, 0});
      s_.votes[v].weight += place.weight;
      s_.votes[v].num_voters++;
      s_.vote_of[i] = v;
    }
    return total;
  }

  // Appends to `voters` those of each vote, in a row.
  void list_voters(uint32_t first, uint32_t count) {
    uint32_t begin = (uint32_t)s_.voters.size();
    for (Vote& vote : s_.votes) {
      vote.end = begin;
      begin += vote.num_voters;
    }
    s_.voters.resize(begin);
    for (uint32_t i = 0; i < count; i++) {
      if (s_.vote_of[i] != kNoVote) s_.voters[s_.votes[s_.vote_of[i]].end++] = s_.voters[first + i];
    }
  }

  const PlSuffixDraft& call_;
  PlText& own_;
  const int32_t num_nodes_, max_depth_;
  Scratch& s_;
  const int32_t* suffix_end_ = nullptr;  // the last token, of [suffix_length_] that are compared
  int32_t suffix_length_ = 0, longest_ = 0;
  int num_sizes_ = 0;
  uint32_t hashes_[kMaxSizes];
};

}  // namespace

extern "C" {

PlText* pl_text_new(const int32_t* sizes, int32_t count) {
  if (count < 1 || count > kMaxSizes) return nullptr;
  try {
    auto text = std::make_unique<PlText>();
    text->sizes.assign(sizes, sizes + count);
    std::sort(text->sizes.begin(), text->sizes.end());
    text->tables.resize(count);
    return text.release();
  } catch (...) {
    return nullptr;
  }
}

void pl_text_free(PlText* text) { delete text; }

// 0, or PL_SUFFIX_NO_MEMORY: then nothing was taken in.
int32_t pl_text_extend(PlText* text, const int32_t* tokens, int32_t count) {
  try {
    text->extend(tokens, count);
  } catch (...) {
    return PL_SUFFIX_NO_MEMORY;
  }
  return 0;
}

// Take in what is new of the request's text, then draft: the number of nodes, or PL_SUFFIX_NO_PLACE where the text's
// end stood nowhere before, or as pl_text_extend.
int32_t pl_suffix_draft(const PlSuffixDraft* call, PlText* own, const int32_t* added, int32_t count, int32_t num_nodes,
                        int32_t max_depth) {
  if (const int32_t status = pl_text_extend(own, added, count)) return status;
  try {
    thread_local Scratch scratch;
    Drafting drafting(*call, *own, num_nodes, max_depth, scratch);
    return drafting.find_places() ? drafting.unfold() : PL_SUFFIX_NO_PLACE;
  } catch (...) {
    return PL_SUFFIX_NO_PLACE;  // the text was taken in; a draft can be done without
  }
}
}
