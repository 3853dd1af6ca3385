// Packs the rows of growing sequences into one buffer: each sequence is a run of rows with spare rows behind it.
//
// Attention reads spare rows too, so runs are packed closely. Runs are moved only to make room for several rows at
// once: a sequence mostly grows by one row a step, so a step moves little on average.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

class RowPacking {
 public:
  struct Run {
    std::int64_t owner = 0;
    std::int32_t begin = 0, count = 0, end = 0;  // rows [begin, begin + count) are used, those up to `end` are room
    std::int32_t more = 1;                       // rows that grow() adds
  };
  struct Move {
    std::int64_t from, to, count;
  };

  // At most `runs` runs at a time of at most `longest` rows each; capacity() rows in all.
  RowPacking(std::int64_t runs, std::int64_t longest) : runs_at_most_(runs), longest_(longest) {}

  std::int64_t capacity() const { return runs_at_most_ * longest_; }
  std::int64_t rows() const { return static_cast<std::int64_t>(subtree_end_.size()); }  // up to the last run's end
  std::int64_t touched() const { return touched_; }                                     // the most rows() has been
  std::span<const Run> runs() const { return runs_; }                                   // ascending
  std::span<const std::int32_t> subtree_end() const { return subtree_end_; }            // as attention reads it

  void add(std::int64_t owner);  // an empty run behind the others, without room
  void remove(std::int64_t owner);
  void keep_first(std::int64_t owner, std::int64_t rows);  // of the owner's run

  // Sets the number of rows that grow() adds to run i; 0: it waits.
  void set_more(std::size_t run, std::int64_t more) { runs_[run].more = static_cast<std::int32_t>(more); }
  // Room for `more` rows in every run. Overwrites `moves` with copies to be made in order (ranges may overlap).
  void make_room(std::vector<Move>& moves);
  // `more` rows in every run: afterwards run i's newest row is runs()[i].begin + runs()[i].count - 1.
  void grow();

 private:
  std::int64_t runs_at_most_, longest_;
  std::vector<Run> runs_;
  std::vector<std::int32_t> subtree_end_;
  std::int64_t touched_ = 0;
};

}  // namespace espalier
