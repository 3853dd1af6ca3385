// Loops over pairs of number formats, in pieces that threads share.
#include "espalier/checkpoint/convert.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "espalier/base/error.h"
#include "espalier/base/float16.h"

namespace espalier {
namespace {

template <class To, class From>
To value_as(From value) {
  if constexpr (std::is_same_v<To, double>)
    return static_cast<double>(value);
  else
    return To(static_cast<float>(value));
}

template <class From, class To>
void convert_piece(const std::byte* from, std::byte* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    const To result = value_as<To>(value);
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof(To)), &result, sizeof(To));
  }
}

using Piece = void (*)(const std::byte*, std::byte*, std::int64_t);

template <class From>
Piece piece_to(DType to) {
  switch (to) {
    case DType::float64:
      return convert_piece<From, double>;
    case DType::float32:
      return convert_piece<From, float>;
    case DType::bfloat16:
      return convert_piece<From, bfloat16>;
  }
  return nullptr;
}

Piece piece_for(TensorType from, DType to) {
  switch (from) {
    case TensorType::F64:
      return piece_to<double>(to);
    case TensorType::F32:
      return piece_to<float>(to);
    case TensorType::F16:
      return piece_to<float16>(to);
    case TensorType::BF16:
      return piece_to<bfloat16>(to);
    default:
      return nullptr;
  }
}

}  // namespace

bool is_floating(TensorType type) { return piece_for(type, DType::float32) != nullptr; }

void convert_values(TensorType from_type, const void* from, DType to_type, void* to, std::int64_t count) {
  const Piece convert = piece_for(from_type, to_type);
  ESPALIER_INTERNAL(convert != nullptr, name_of(from_type), " to ", name_of(to_type));
  const bool copy = from_type == tensor_type_of(to_type);
  const std::int64_t from_bytes = bytes_of(from_type), to_bytes = bytes_of(to_type);
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);

  constexpr std::int64_t kPiece = std::int64_t{1} << 18;
  const std::int64_t pieces = (count + kPiece - 1) / kPiece;
#pragma omp parallel for schedule(static) if (pieces > 1)
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    const std::int64_t begin = piece * kPiece, size = std::min(kPiece, count - begin);
    if (copy)
      std::memcpy(target + begin * to_bytes, source + begin * from_bytes, static_cast<std::size_t>(size * to_bytes));
    else
      convert(source + begin * from_bytes, target + begin * to_bytes, size);
  }
}

}  // namespace espalier
