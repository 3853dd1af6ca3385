// Gradients of ranks that hold the same weights, summed over them once a step, beside the backward that computes them.
//
// In the last backward of a step a layer's gradient is whole as soon as the layer is behind it: its sum begins while
// the layers below still run. The order is that of a backward, head and final norm first, the embedding last, on every
// rank: one without rows begins all of them when it has nothing left to do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "espalier/model/guest.h"
#include "espalier/parallel/mesh.h"
#include "espalier/shape/units.h"

namespace espalier {

// One collective takes this much at most, so that no buffer of the communication library is as large as the model.
inline constexpr std::int64_t kBucketBytes = std::int64_t{64} << 20;

class ReplicaSums final : public Guest {
 public:
  // `flat`: whole accumulators of what this rank has of the parameters that train. The mesh must outlive the object.
  ReplicaSums(const LocalShape& shape, at::Tensor flat, const Mesh& mesh);

  // In the last backward: what was added at the stop was the last of this rank.
  void leave(const Stop& stop) override;

  void begin_last_backward() { last_ = true; }
  // Sums whatever is not yet summed, and waits for all of it.
  void finish();

  std::int64_t given() const { return given_; }  // bytes, in sums begun since the last `finish`

 private:
  void start_upto(std::size_t end);

  at::Tensor flat_;
  const Mesh& mesh_;
  std::vector<Unit> units_;  // in the order of their sums
  std::size_t next_ = 0;     // of them
  bool last_ = false;
  std::int64_t given_ = 0;
  std::vector<Pending> under_way_;
};

}  // namespace espalier
