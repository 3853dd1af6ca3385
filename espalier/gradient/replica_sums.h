// Sums the gradients over ranks that hold the same weights, once a step, beside the backward that computes them.
//
// In the last backward of a step a layer's gradient is complete as soon as the layer is done, so its sum begins while
// the layers below still run. The order is that of a backward on every rank: head and final norm first, the embedding
// last. A rank without rows begins all sums when it has nothing left to do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "espalier/model/guest.h"
#include "espalier/parallel/mesh.h"
#include "espalier/shape/units.h"

namespace espalier {

// The most bytes of one collective, so that no buffer of the communication library is as large as the model.
inline constexpr std::int64_t kBucketBytes = std::int64_t{64} << 20;

class ReplicaSums final : public Guest {
 public:
  // `flat`: the accumulators of this rank's trained parameters. The mesh must outlive the object.
  ReplicaSums(const LocalShape& shape, at::Tensor flat, const Mesh& mesh);

  // In the last backward: this rank's gradient at the stop is complete.
  void leave(const Stop& stop) override;

  void begin_last_backward() { last_ = true; }
  // Sums what is left, and waits for all sums.
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
