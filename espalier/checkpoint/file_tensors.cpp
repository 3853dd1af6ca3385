#include "espalier/checkpoint/file_tensors.h"

#include <algorithm>
#include <unordered_set>

#include "espalier/base/error.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/strided_copy.h"

namespace espalier {

std::vector<FileTensor> file_tensors(const ParameterTable& table, AddedNames added) {
  std::vector<FileTensor> tensors;
  std::unordered_set<std::string> seen;
  for (const Parameter& p : table.parameters()) {
    const bool own = p.added && added == AddedNames::own;
    const bool part = !own && p.file.is_part();
    const std::string& name = own ? p.name : p.file_tensor();
    if (!tensors.empty() && tensors.back().name == name && part) {
      tensors.back().parts.push_back({&p, &p.file});
      continue;
    }
    ESPALIER_INTERNAL(seen.insert(name).second, "the parts of '", name, "' are apart in the table");
    tensors.push_back({.name = name,
                       .shape = part ? p.file.shape : p.shape,
                       .count = part ? p.file.size() : p.count,
                       .parts = {{&p, part ? &p.file : nullptr}}});
  }
  return tensors;
}

std::vector<TensorSpec> specs_of(const std::vector<FileTensor>& tensors, DType to, const std::string& prefix) {
  std::vector<TensorSpec> out;
  out.reserve(tensors.size());
  for (const FileTensor& tensor : tensors) out.push_back({prefix + tensor.name, tensor.type(to), tensor.shape});
  return out;
}

void give_converted(const ValueSink& sink, TensorType from, const void* values, DType to, std::int64_t count) {
  if (from == tensor_type_of(to)) return sink(values, count * bytes_of(to));
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  const auto* const begin = static_cast<const std::byte*>(values);
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(kPiece, count) * bytes_of(to)));
  for (std::int64_t first = 0; first < count; first += kPiece) {
    const std::int64_t size = std::min(kPiece, count - first);
    convert_values(from, begin + first * bytes_of(from), to, piece.data(), size);
    sink(piece.data(), size * bytes_of(to));
  }
}

void append_tensor(SafetensorsWriter& writer, const FileTensor& tensor, DType to, const GiveValues& give) {
  if (tensor.stored != nullptr) {
    std::vector<std::byte> room;
    writer.append(values_of(*tensor.stored, room), tensor.stored->bytes);
    forget_pages(*tensor.stored);
  }
  const std::int64_t bytes = bytes_of(to);
  std::int64_t written = 0, last = 0, waiting = 0;  // elements: appended; behind the last that wait; that wait
  std::vector<std::byte> among, values;             // elements [written, last), 0 where none was given; of a part
  const auto flush = [&](std::int64_t end) {
    among.resize(static_cast<std::size_t>((end - written) * bytes));
    writer.append(among.data(), static_cast<std::int64_t>(among.size()));
    among.clear();
    written = last = end, waiting = 0;
  };
  for (const auto& [parameter, place] : tensor.parts) {
    const bool follows = place == nullptr || (waiting == 0 && place->is_contiguous() && place->first == written);
    if (follows) {
      give(*parameter, [&](const void* piece, std::int64_t size) { writer.append(piece, size); });
      written = last = written + parameter->count;
      continue;
    }
    values.clear();
    give(*parameter, [&](const void* piece, std::int64_t size) {
      const auto* const begin = static_cast<const std::byte*>(piece);
      values.insert(values.end(), begin, begin + size);
    });
    ESPALIER_INTERNAL(place->first >= written, "the parts of '", tensor.name, "' do not follow each other");
    last = std::max(last, place->end());
    among.resize(static_cast<std::size_t>((last - written) * bytes));
    copy_strided(bytes, place->rows, place->columns, place->columns, 1, place->row_step, place->column_step,
                 values.data(), among.data() + (place->first - written) * bytes);
    waiting += parameter->count;
    if (waiting == last - written) flush(last);
  }
  if (tensor.stored == nullptr && written < tensor.count) flush(tensor.count);
}

}  // namespace espalier
