// Numbers of a tensor in a safetensors file, for what a shape takes from them (config/stored_headers.h).
#pragma once

#include <cstddef>
#include <fstream>
#include <string_view>
#include <vector>

#include "espalier/config/stored_headers.h"

namespace espalier {

// Reads the values of a tensor in pieces. The tensor must outlive the object.
class StoredValues {
 public:
  explicit StoredValues(const StoredTensor& tensor);

  // 0 where the type is no floating-point number, or where the bytes are other than the shape says.
  std::size_t count() const { return count_; }
  // The next values. False if the file ends before.
  bool read(std::size_t count);
  const std::vector<char>& bytes() const { return bytes_; }  // of these
  double operator[](std::size_t i) const;

 private:
  std::ifstream file_;
  std::size_t each_, count_;
  std::string_view dtype_;
  std::vector<char> bytes_;
};

}  // namespace espalier
