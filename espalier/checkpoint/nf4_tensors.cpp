#include "espalier/checkpoint/nf4_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/float16.h"
#include "espalier/base/nf4.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/json_file.h"

namespace espalier {
namespace {

using Tensors = std::map<std::string, const SafetensorsEntry*>;

constexpr std::string_view kState = ".quant_state.bitsandbytes__", kWeight = ".weight";
constexpr const char* kRemedy = "Write the model again with transformers and bitsandbytes";

std::vector<float> numbers_of(const SafetensorsEntry& entry) {
  std::vector<float> out(static_cast<std::size_t>(entry.count));
  convert_values(entry.type, entry.data, DType::float32, out.data(), entry.count);
  return out;
}

const std::uint8_t* bytes_in(const SafetensorsEntry& entry) {
  return reinterpret_cast<const std::uint8_t*>(entry.data);
}

TensorType type_of(nf4::Rounding rounding) {
  switch (rounding) {
    case nf4::Rounding::bfloat16:
      return TensorType::BF16;
    case nf4::Rounding::float16:
      return TensorType::F16;
    case nf4::Rounding::float32:
      break;
  }
  return TensorType::F32;
}

// One number in the dtype that it was rounded to.
void put(float value, nf4::Rounding rounding, std::byte* out) {
  if (rounding == nf4::Rounding::float32) {
    std::memcpy(out, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = rounding == nf4::Rounding::float16 ? float16(value).bits : bfloat16(value).bits;
  std::memcpy(out, &bits, sizeof(bits));
}

void unpack(const nf4::Matrix& matrix, std::byte* out) {
  std::vector<std::byte> row(static_cast<std::size_t>(nf4::row_bytes(matrix.columns, matrix.nested())));
  std::vector<float> values(static_cast<std::size_t>(matrix.columns));
  const std::int64_t bytes = bytes_of(type_of(matrix.rounding));
  for (std::int64_t n = 0; n < matrix.rows; ++n) {
    nf4::write_row(matrix, n, 0, matrix.columns, row.data());
    nf4::row_values(row.data(), 0, matrix.columns, values.data());
    for (const float value : values) put(value, matrix.rounding, std::exchange(out, out + bytes));
  }
}

// The tensors of one matrix.
class Stored {
 public:
  Stored(const Tensors& tensors, std::string weight, const std::string& where)
      : tensors_(tensors), weight_(std::move(weight)), where_(where) {}

  nf4::Matrix read(const SafetensorsEntry& state) {
    const Json json =
        parse_json_object(std::string(reinterpret_cast<const char*>(state.data), static_cast<std::size_t>(state.bytes)),
                          where_ + ": tensor '" + printable(state.name) + "'");
    nf4::Matrix out;
    read_shape(json, out);
    out.rounding = rounding_of(json);
    if (integer(json, "blocksize") != nf4::kBlock)
      throw UnsupportedError({place(""), text_of("blocks of ", nf4::kBlock, " numbers"),
                              text_of("blocksize ", json.value("blocksize", Json()).dump()),
                              "quantise with the default blocksize"});
    if (out.columns % nf4::kBlock != 0)
      throw UnsupportedError({place(""), text_of("rows of a multiple of ", nf4::kBlock, " numbers"),
                              text_of(out.columns), "use the model's unquantised weights"});
    out.codes = bytes_in(tensor("", TensorType::U8, out.rows * out.columns / 2));
    const std::vector<float> codes = numbers_of(tensor(".quant_map", TensorType::F32, std::ssize(nf4::kCodes)));
    if (!std::ranges::equal(codes, nf4::kCodes)) fail(".quant_map", "the 16 numbers of NF4", "other numbers");
    const bool nested = json.contains("nested_offset") || find(".nested_absmax") != nullptr;
    if (!nested) {
      out.absmax = finite(".absmax", out.blocks());
      return out;
    }
    if (integer(json, "nested_blocksize") != nf4::kNestedBlock)
      throw UnsupportedError({place(""), text_of("nested blocks of ", nf4::kNestedBlock),
                              text_of("nested_blocksize ", json.value("nested_blocksize", Json()).dump()),
                              "quantise with the default nested blocksize"});
    out.nested_codes = bytes_in(tensor(".absmax", TensorType::U8, out.blocks()));
    out.absmax = finite(".nested_absmax", (out.blocks() + nf4::kNestedBlock - 1) / nf4::kNestedBlock);
    const std::vector<float> map = finite(".nested_quant_map", 256);
    nf4::Map numbers;
    std::ranges::copy(map, numbers.begin());
    out.map = nf4::index_of(numbers);
    const Json offset = json.value("nested_offset", Json());
    if (!offset.is_number() || !std::isfinite(offset.get<float>()))
      fail(".quant_state", "nested_offset, a number", offset.dump());
    out.offset = offset.get<float>();
    return out;
  }

  [[noreturn]] void fail(const std::string& member, const std::string& expected, const std::string& got) const {
    throw InputError({place(member), expected, got, kRemedy});
  }

 private:
  std::string place(const std::string& member) const {
    return where_ + ": tensor '" + printable(weight_ + member) + "'";
  }

  const SafetensorsEntry* find(const std::string& member) const {
    const auto found = tensors_.find(weight_ + member);
    return found == tensors_.end() ? nullptr : found->second;
  }

  const SafetensorsEntry& tensor(const std::string& member, TensorType type, std::int64_t count) const {
    const SafetensorsEntry* const found = find(member);
    const std::string expected = text_of(name_of(type), " with ", count, " numbers");
    if (found == nullptr) fail(member, expected, "no such tensor");
    if (found->type != type || found->count != count || found->data == nullptr)
      fail(member, expected, text_of(name_of(found->type), " ", shape_text(found->shape)));
    return *found;
  }

  std::vector<float> finite(const std::string& member, std::int64_t count) const {
    std::vector<float> out = numbers_of(tensor(member, TensorType::F32, count));
    if (!std::ranges::all_of(out, [](float x) { return std::isfinite(x); }))
      fail(member, "finite numbers", "infinite ones or NaN");
    return out;
  }

  static std::int64_t integer(const Json& json, const char* name) {
    const Json value = json.value(name, Json());
    return value.is_number_integer() ? value.get<std::int64_t>() : -1;
  }

  void read_shape(const Json& json, nf4::Matrix& out) const {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const Json shape = json.value("shape", Json());
    const auto side = [&](std::size_t dim) {
      return shape.is_array() && shape.size() == 2 && shape[dim].is_number_integer() ? shape[dim].get<std::int64_t>()
                                                                                     : 0;
    };
    out.rows = side(0), out.columns = side(1);
    if (out.rows < 1 || out.columns < 1 || out.rows > kMost || out.columns > kMost)
      fail(".quant_state", "shape, the rows and columns of a matrix", shape.dump());
  }

  nf4::Rounding rounding_of(const Json& json) const {
    const Json dtype = json.value("dtype", Json());
    if (dtype == Json("bfloat16")) return nf4::Rounding::bfloat16;
    if (dtype == Json("float16")) return nf4::Rounding::float16;
    if (dtype != Json("float32")) fail(".quant_state", "dtype bfloat16, float16 or float32", dtype.dump());
    return nf4::Rounding::float32;
  }

  const Tensors& tensors_;
  std::string weight_;
  const std::string& where_;
};

}  // namespace

void join_nf4_tensors(Tensors& tensors, std::list<SafetensorsEntry>& parts, const std::string& where) {
  std::vector<const SafetensorsEntry*> states;
  for (const auto& [name, entry] : tensors)
    if (name.find(kState) != name.npos) states.push_back(entry);
  for (const SafetensorsEntry* const state : states) {
    const std::size_t end = state->name.find(kState);
    const std::string weight = state->name.substr(0, end), type = state->name.substr(end + kState.size());
    if (type != "nf4" || !weight.ends_with(kWeight))
      throw UnsupportedError({where + ": tensor '" + printable(state->name) + "'", "matrices in NF4", printable(type),
                              "quantise with bnb_4bit_quant_type nf4"});
    if (state->type != TensorType::U8)
      throw InputError({where + ": tensor '" + printable(state->name) + "'", "U8", name_of(state->type), kRemedy});
    const auto matrix = std::make_shared<const nf4::Matrix>(Stored(tensors, weight, where).read(*state));
    SafetensorsEntry part{.name = weight, .type = type_of(matrix->rounding), .shape = {matrix->rows, matrix->columns}};
    part.count = matrix->rows * matrix->columns;
    part.bytes = part.count * bytes_of(part.type);
    part.unpack = [matrix](std::byte* out) { unpack(*matrix, out); };
    part.quantised = matrix;
    parts.push_back(std::move(part));
    tensors[weight] = &parts.back();
    for (const char* const member : {".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"})
      tensors.erase(weight + member);
    tensors.erase(state->name);
  }
  for (const auto& [name, entry] : tensors)
    if (name.ends_with(".weight.absmax"))
      throw InputError({where + ": tensor '" + printable(name) + "'",
                        text_of("its matrix's .weight", kState, "nf4 beside it"), "no such tensor", kRemedy});
}

}  // namespace espalier
