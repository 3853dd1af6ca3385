#include "espalier/gradient/reduction.h"

#include <algorithm>

namespace espalier {

void sum_over_ranks(GradientSet& gradients, const Mesh& mesh) {
  const at::Tensor& flat = gradients.flat();
  const std::int64_t bucket = kBucketBytes / static_cast<std::int64_t>(flat.element_size());
  for (std::int64_t begin = 0; begin < flat.numel(); begin += bucket)
    mesh.replicas.add_over_ranks(flat.narrow(0, begin, std::min(bucket, flat.numel() - begin)));
}

}  // namespace espalier
