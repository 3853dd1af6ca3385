// Names of types, texts for messages, and the writer.
#include <bit>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/rollout/json_text.h"

namespace espalier {

static_assert(std::endian::native == std::endian::little, "safetensors holds little-endian numbers");

std::int64_t bytes_of(TensorType type) {
  switch (type) {
    case TensorType::F64:
    case TensorType::I64:
    case TensorType::U64:
      return 8;
    case TensorType::F32:
    case TensorType::I32:
    case TensorType::U32:
      return 4;
    case TensorType::F16:
    case TensorType::BF16:
    case TensorType::I16:
    case TensorType::U16:
      return 2;
    default:
      return 1;
  }
}

const char* name_of(TensorType type) {
  constexpr const char* kNames[] = {"F64", "F32", "F16", "BF16", "I64",  "I32",     "I16",     "I8",
                                    "U64", "U32", "U16", "U8",   "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"};
  return kNames[static_cast<std::size_t>(type)];  // in the order of the enumeration
}

TensorType tensor_type_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return TensorType::F64;
    case DType::float32:
      return TensorType::F32;
    case DType::bfloat16:
      return TensorType::BF16;
  }
  return TensorType::F32;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (const std::int64_t size : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(size);
  return out + "]";
}

std::string printable(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  std::string out(name.substr(0, kLongest));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return name.size() > kLongest ? out + "..." : out;
}

SafetensorsWriter::SafetensorsWriter(OutputFile& output, const std::vector<TensorSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : output_(output) {
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      header += (header.back() == '{' ? "" : ",") + json_quoted(key) + ":" + json_quoted(value);
    header += "}";
  }
  for (const TensorSpec& tensor : tensors) {
    std::int64_t bytes = bytes_of(tensor.type);
    std::string shape;
    for (const std::int64_t size : tensor.shape) {
      ESPALIER_INTERNAL(size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes), "tensor '", tensor.name, "'");
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
    }
    header += (header.size() > 1 ? "," : "") + json_quoted(tensor.name) + ":{\"dtype\":\"" + name_of(tensor.type) +
              "\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(missing_bytes_) + "," +
              std::to_string(missing_bytes_ + bytes) + "]}";
    missing_bytes_ += bytes;
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');  // the data begins at a multiple of 8
  const std::uint64_t header_bytes = header.size();
  output_.write(&header_bytes, sizeof header_bytes);
  output_.write(header);
}

void SafetensorsWriter::append(const void* data, std::int64_t bytes) {
  ESPALIER_INTERNAL(bytes >= 0 && bytes <= missing_bytes_, bytes, " bytes where ", missing_bytes_, " are missing");
  output_.write(data, static_cast<std::size_t>(bytes));
  missing_bytes_ -= bytes;
}

void SafetensorsWriter::finish() { ESPALIER_INTERNAL_EQ(missing_bytes_, 0, "tensor data is missing"); }

}  // namespace espalier
