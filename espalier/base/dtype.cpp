#include "espalier/base/dtype.h"

#include "espalier/base/error.h"

namespace espalier {

std::int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::bfloat16:
      return 2;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return "float64";
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
  }
  return "";
}

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    if (name == name_of(dtype)) return dtype;
  throw OptionError({"dtype", "float64, float32 or bfloat16", "'" + name + "'", ""});
}

}  // namespace espalier
