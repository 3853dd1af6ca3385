#include "espalier/serve/tensor_message.h"

#include <bit>
#include <cstring>
#include <optional>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

enum TensorField { kDense = 1, kSparse = 2, kType = 3, kShape = 4 };
enum SparseField { kValues = 1, kRowBegins = 2, kColumns = 3 };

[[noreturn]] void refuse(std::string expected, std::string got) {
  throw InputError({"a tensor", std::move(expected), std::move(got), ""});
}

struct SparseBytes {
  Bytes values, row_begins, columns;
};

SparseBytes read_sparse(Bytes message) {
  SparseBytes out;
  for (WireReader reader(message); reader.next();) {
    if (reader.field() == kValues) out.values = reader.bytes();
    if (reader.field() == kRowBegins) out.row_begins = reader.bytes();
    if (reader.field() == kColumns) out.columns = reader.bytes();
  }
  return out;
}

std::size_t bytes_of(ElementType type) {
  return type == ElementType::int64 ? 8 : type == ElementType::bfloat16 ? 2 : 4;
}

template <class T>
T element(Bytes bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

std::size_t count_of(Bytes bytes, std::size_t size) {
  if (bytes.size() % size != 0) refuse(text_of("whole elements of ", size, " bytes"), text_of(bytes.size(), " bytes"));
  return bytes.size() / size;
}

// Writes element `from` of the bytes to place `to`.
void copy_element(Bytes bytes, ElementType type, std::size_t from, Tensor& out, std::size_t to) {
  switch (type) {
    case ElementType::int64:
      out.integers[to] = element<std::int64_t>(bytes, from);
      return;
    case ElementType::int32:
      out.integers[to] = element<std::int32_t>(bytes, from);
      return;
    case ElementType::bfloat16:
      out.floats[to] = std::bit_cast<float>(std::uint32_t{element<std::uint16_t>(bytes, from)} << 16);
      return;
    default:
      out.floats[to] = element<float>(bytes, from);
  }
}

void fill_sparse(const SparseBytes& sparse, ElementType type, Tensor& out) {
  if (out.shape.size() != 2) refuse("two dimensions of a sparse tensor", text_of(out.shape.size()));
  const std::size_t count = count_of(sparse.values, bytes_of(type));
  if (count_of(sparse.row_begins, 8) != static_cast<std::size_t>(out.shape[0]) + 1 ||
      count_of(sparse.columns, 8) != count)
    refuse("crow_indices and col_indices that fit the shape and the values", "indices of another shape");
  std::int64_t begin = element<std::int64_t>(sparse.row_begins, 0);
  if (begin != 0) refuse("crow_indices that begin with 0", text_of(begin));
  for (std::int64_t row = 0; row < out.shape[0]; ++row) {
    const auto end = element<std::int64_t>(sparse.row_begins, static_cast<std::size_t>(row) + 1);
    if (end < begin || end > static_cast<std::int64_t>(count))
      refuse(text_of("crow_indices that ascend to ", count), text_of(begin, " before ", end));
    std::int64_t before = -1;
    for (; begin < end; ++begin) {
      const auto column = element<std::int64_t>(sparse.columns, static_cast<std::size_t>(begin));
      if (column <= before || column >= out.shape[1])
        refuse(text_of("col_indices that ascend within [0, ", out.shape[1], ")"), text_of(column));
      copy_element(sparse.values, type, static_cast<std::size_t>(begin), out,
                   static_cast<std::size_t>(row * out.shape[1] + column));
      before = column;
    }
  }
  if (begin != static_cast<std::int64_t>(count)) refuse(text_of("crow_indices that end with ", count), text_of(begin));
}

}  // namespace

Tensor read_tensor(Bytes message, std::int64_t& numbers) {
  Tensor out;
  Bytes dense;
  std::optional<SparseBytes> sparse;
  std::uint64_t type_number = 0;
  for (WireReader reader(message); reader.next();) switch (reader.field()) {
      case kDense:
        dense = reader.bytes(), sparse.reset();
        break;
      case kSparse:
        sparse = read_sparse(reader.bytes());
        break;
      case kType:
        type_number = reader.varint();
        break;
      case kShape:
        reader.add_varints(out.shape);
        break;
    }
  if (type_number < 1 || type_number > 4)
    refuse("dtype float32, bfloat16, int64 or int32", text_of("number ", type_number));
  const auto type = static_cast<ElementType>(type_number);
  out.is_integer = type == ElementType::int64 || type == ElementType::int32;
  if (out.shape.size() > 8) refuse("at most eight dimensions", text_of(out.shape.size()));
  if (out.shape.empty() && !sparse) out.shape = {static_cast<std::int64_t>(count_of(dense, bytes_of(type)))};
  std::int64_t size = 1;
  for (const std::int64_t side : out.shape) {
    if (side < 0 || (side > 0 && size > numbers / side))
      refuse(text_of("a shape of at most ", numbers, " numbers"), text_of("a side of ", side));
    size *= side;
  }
  numbers -= size;
  (out.is_integer ? out.integers.resize(static_cast<std::size_t>(size))
                  : out.floats.resize(static_cast<std::size_t>(size)));
  if (sparse) {
    fill_sparse(*sparse, type, out);
    return out;
  }
  if (count_of(dense, bytes_of(type)) != static_cast<std::size_t>(size))
    refuse(text_of(size, " numbers, as its shape says"), text_of(count_of(dense, bytes_of(type))));
  for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) copy_element(dense, type, i, out, i);
  return out;
}

}  // namespace espalier::serve
