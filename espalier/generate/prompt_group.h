// The keys and values of one prompt, held once, and of its responses, packed behind it.
//
// P prompt rows, M width. Each group has its own memory, so that groups can end in any order; pages are touched as rows
// are written.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <span>
#include <vector>

#include "espalier/generate/group_source.h"
#include "espalier/generate/row_packing.h"
#include "espalier/model/open_path.h"

namespace espalier {

class PromptGroup {
 public:
  // At most `responses` at a time, each keeping at most `longest` rows (its last token has none).
  PromptGroup(const ModelShape& shape, at::ScalarType dtype, std::int64_t prompt_rows, std::int64_t responses,
              std::int64_t longest, Device& device);

  std::int64_t prompt_rows() const { return prompt_rows_; }
  std::int64_t held_rows() const { return prompt_rows_ + packing_.touched(); }  // whose memory has been touched

  // Prompt rows [begin, end) as a set of rows appends them.
  RowGroup append_prompt(std::int64_t begin, std::int64_t end) const;
  // The normalised hidden row of the last prompt token, [M], filled by the caller that computes the prompt.
  const at::Tensor& last_hidden_M() const { return last_hidden_M_; }

  // True if rows of another prompt can be taken: where no layer's rows carry a state, which only the last row has.
  bool can_take_rows() const { return states_ == 0; }
  // Overwrites the first `rows` rows with the rows of `other`, whose prompt begins with the same tokens.
  void take_rows(const PromptGroup& other, std::int64_t rows);

  void add(std::int64_t response);
  void remove(std::int64_t response);
  // Drops the response's rows behind its first `rows`. False, and nothing changes, if its rows carry states, which
  // cannot go back.
  bool keep_first(std::int64_t response, std::int64_t rows);
  // Responses that have rows, in the order of those rows.
  std::span<const RowPacking::Run> responses() const { return packing_.runs(); }
  // Sets the number of rows that append_step adds to the response of run `run`: 1 by default; 0: the response waits.
  void set_more(std::size_t run, std::int64_t rows) { packing_.set_more(run, rows); }
  // The next rows of every response, several of one in order; valid until the next change.
  RowGroup append_step();

 private:
  std::int64_t layers_, prompt_rows_;
  RowPacking packing_;
  std::int64_t states_;  // numbers of states
  Arena memory_;
  at::Tensor last_hidden_M_;
  OpenPath prompt_, responses_;
  // States of recurrent layers: the prompt's, and one for each live response; a response has one of the places.
  at::Tensor prompt_N_;
  std::vector<at::Tensor> response_N_;
  std::vector<std::size_t> free_;
  std::map<std::int64_t, std::size_t> place_of_;
  std::vector<std::int32_t> prompt_end_;  // [P], all P
  bool has_window_;
  std::vector<std::int32_t> prompt_depth_, response_depth_;  // where the model has layers with a window
  std::vector<RowPacking::Move> moves_;
};

}  // namespace espalier
