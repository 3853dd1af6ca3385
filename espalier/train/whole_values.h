// Tensors of which ranks hold parts (tp, ep, pp; under --shard masters and moments, or all), whole again for a file:
// one parameter at a time, on rank 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "espalier/optimizer/adamw.h"
#include "espalier/state/model_state.h"

namespace espalier {

class WholeValues {
 public:
  // The model must outlive the object, and the object what of() gives. `between`, if there is one, is called before
  // each parameter.
  explicit WholeValues(const ModelState& model, std::function<void()> between = {});

  const ParameterTable& table() const { return table_; }  // the trained parameters of the whole model

  // Whole parameters of a flat tensor in the layout of model.table; or of a part of it: optimizer.masters() or a
  // moment. On rank 0, valid until the object gives the next; null on the others, which all ask for the same parameters
  // of table() in the same order.
  ParameterValues of(const at::Tensor& flat) const { return of(flat, 1); }
  ParameterValues of(const at::Tensor& part, const AdamW& optimizer) const {
    return of(part, optimizer.shares().size());
  }

  // For the other ranks: sends their values while rank 0 writes.
  void give(const ParameterValues& values) const;

 private:
  // Ranks that are the first to have something, with what they have.
  struct Holder {
    int rank;
    ParameterTable table;
  };

  // A rank, and its part of a parameter in the flat tensor that is given.
  struct Piece {
    int rank;
    Kept kept;
  };

  ParameterValues of(const at::Tensor& part, int shares) const;
  // Together what a holder has of a parameter.
  std::vector<Piece> pieces_of(const Holder& holder, const Parameter& parameter, int shares) const;
  // The part of one holder, on rank 0; undefined on the others.
  at::Tensor part_of(const Holder& holder, const Parameter& parameter, const at::Tensor& part, int shares) const;

  const ModelState& model_;
  std::function<void()> between_;
  ParameterTable table_;
  std::vector<Holder> holders_;
  mutable at::Tensor whole_;  // the parameter asked for last
};

// Overwrites what this rank keeps of a parameter in a flat buffer, `out`, with its part of the whole values, of `bytes`
// each.
void take_values(const Parameter& parameter, const Kept& kept, const std::byte* whole, std::int64_t bytes,
                 std::byte* out);

// The part of a parameter in elements [range.begin, range.end) of the flat buffers of weights: its place counts there.
Kept kept_within(const Kept& kept, const AdamW::Range& range);

}  // namespace espalier
