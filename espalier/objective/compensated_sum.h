// A sum that collects its rounding errors apart (Neumaier), so that its value hardly depends on the order of the terms.
// NaN after an infinite term or an overflow.
#pragma once

#include <cmath>

namespace espalier {

class CompensatedSum {
 public:
  void add(double x) {
    const double next = sum_ + x;
    error_ += std::abs(sum_) >= std::abs(x) ? (sum_ - next) + x : (x - next) + sum_;
    sum_ = next;
  }
  double value() const { return sum_ + error_; }

 private:
  double sum_ = 0, error_ = 0;
};

}  // namespace espalier
