// Own products or the library's (base/defined_sums.h) while an object lives.
#pragma once

#include "espalier/base/defined_sums.h"

namespace espalier {

class WithProducts {
 public:
  explicit WithProducts(bool own) { set_defined_sums(own); }
  ~WithProducts() { set_defined_sums(before_); }
  WithProducts(const WithProducts&) = delete;
  WithProducts& operator=(const WithProducts&) = delete;

 private:
  bool before_ = defined_sums();
};

}  // namespace espalier
