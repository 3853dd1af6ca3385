#include "espalier/shape/part_parameters.h"

namespace espalier {

void PartParameters::add(std::vector<ProductShape> neighbours, const char* fused, const char* joint) {
  entries_.push_back({true, products_.size(), neighbours.size(), fused});
  bool first = true;
  for (ProductShape& product : neighbours) {
    for (ProjectionShape& part : product.parts) {
      part.joint = joint;
      part.shares_a = joint[0] != '\0' && !first;
      first = false;
    }
    products_.push_back(std::move(product));
  }
}

void PartParameters::add(TensorRow tensor) {
  entries_.push_back({false, tensors_.size(), 1, ""});
  tensors_.push_back(std::move(tensor));
}

std::int64_t PartParameters::tensor_parameters() const {
  std::int64_t total = 0;
  for (const TensorRow& tensor : tensors_)
    for (const TensorShape& part : tensor.parts) total += part.parameters();
  return total;
}

}  // namespace espalier
