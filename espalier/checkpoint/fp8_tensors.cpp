#include "espalier/checkpoint/fp8_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/fp8.h"
#include "espalier/checkpoint/convert.h"

namespace espalier {
namespace {

using Tensors = std::map<std::string, const SafetensorsEntry*>;

constexpr std::string_view kWeight = ".weight";
constexpr const char *kScaleNames[] = {"_scale_inv", "_scale"},
                     *kUnread[] = {".input_scale", ".activation_scale", ".k_scale", ".v_scale"};
constexpr const char* kRemedy =
    "Does quantization_config of config.json belong to these weights? Else fetch them again";

bool is_e4m3(const SafetensorsEntry& entry) { return entry.type == TensorType::F8_E4M3; }

std::string place_of(const std::string& where, const std::string& name) {
  return where + ": tensor '" + printable(name) + "'";
}

// The factors of a tensor; exponents of ue8m0 as the powers that they stand for, 255 as NaN.
std::vector<float> factors_of(const SafetensorsEntry& entry) {
  std::vector<float> out(static_cast<std::size_t>(entry.count));
  if (is_floating(entry.type)) {
    convert_values(entry.type, entry.data, DType::float32, out.data(), entry.count);
    return out;
  }
  constexpr int kBias = 127, kNan = 255;
  std::transform(entry.data, entry.data + entry.count, out.begin(), [](std::byte exponent) {
    const int e = std::to_integer<int>(exponent);
    return e == kNan ? std::nanf("") : std::ldexp(1.0F, e - kBias);
  });
  return out;
}

std::vector<float> scales_of(const SafetensorsEntry& scale, const quantised::Form& form, std::int64_t rows,
                             std::int64_t columns, const std::string& where) {
  const std::string place = place_of(where, scale.name);
  if (!is_floating(scale.type) && scale.type != TensorType::F8_E8M0 && scale.type != TensorType::U8)
    throw UnsupportedError({place, "scales in F32, BF16, F16, F8_E8M0 or U8", name_of(scale.type), ""});
  std::vector<std::int64_t> shape = scale.shape;
  std::string expected;
  bool fits;
  if (form.block_columns == fp8::kWholeRow) {
    expected = text_of("one number, or one for each of ", rows, " rows");
    if (shape.size() == 2 && shape[1] == 1) shape.pop_back();
    fits = shape.empty() || shape == std::vector<std::int64_t>{1} || shape == std::vector<std::int64_t>{rows};
  } else {
    const std::vector<std::int64_t> blocks{(rows + form.block_rows - 1) / form.block_rows,
                                           (columns + form.block_columns - 1) / form.block_columns};
    expected = text_of("shape ", shape_text(blocks), ", one number for each block of ", form.block_rows, " rows and ",
                       form.block_columns, " columns");
    fits = shape == blocks;
  }
  if (!fits) throw InputError({place, expected, "shape " + shape_text(scale.shape), kRemedy});
  std::vector<float> out = factors_of(scale);
  const auto bad = std::ranges::find_if(out, [](float x) { return !std::isfinite(x); });
  if (bad != out.end())
    throw InputError({place, "finite numbers",
                      text_of(std::isnan(*bad) ? "NaN" : "an infinite one", " at number ", bad - out.begin()),
                      "The weights are damaged; fetch or write them again"});
  if (form.block_columns == fp8::kWholeRow && out.size() == 1) out.resize(static_cast<std::size_t>(rows), out[0]);
  return out;
}

void unpack(const fp8::Matrix& matrix, std::byte* out) {
  std::vector<std::byte> row(static_cast<std::size_t>(fp8::row_bytes(matrix.columns, matrix.block_columns)));
  std::vector<float> values(static_cast<std::size_t>(matrix.columns));
  for (std::int64_t n = 0; n < matrix.rows; ++n) {
    matrix.write_row(n, 0, matrix.columns, matrix.columns, row.data());
    fp8::row_values(row.data(), 0, matrix.columns, values.data());
    std::memcpy(out + n * matrix.columns * 4, values.data(), static_cast<std::size_t>(matrix.columns * 4));
  }
}

SafetensorsEntry joined(const SafetensorsEntry& weight, const SafetensorsEntry& scale, const quantised::Form& form,
                        const std::string& where) {
  const auto matrix = std::make_shared<fp8::Matrix>();
  matrix->where = place_of(where, weight.name);
  matrix->rows = weight.shape[0], matrix->columns = weight.shape[1];
  matrix->block_rows = form.block_rows, matrix->block_columns = form.block_columns;
  matrix->codes = reinterpret_cast<const std::uint8_t*>(weight.data);
  matrix->scales = scales_of(scale, form, matrix->rows, matrix->columns, where);
  SafetensorsEntry out{.name = weight.name, .type = TensorType::F32, .shape = weight.shape};
  out.count = weight.count, out.bytes = weight.count * bytes_of(out.type);
  out.unpack = [matrix](std::byte* to) { unpack(*matrix, to); };
  out.quantised = matrix;
  return out;
}

}  // namespace

void join_fp8_tensors(Tensors& tensors, std::list<SafetensorsEntry>& parts,
                      const std::optional<StoredQuantised>& stored, const std::string& where) {
  std::vector<const SafetensorsEntry*> weights;
  for (const auto& [name, entry] : tensors) {
    if (is_e4m3(*entry)) weights.push_back(entry);
    if (stored && entry->type == TensorType::F8_E5M2)
      throw UnsupportedError({place_of(where, name), "FP8 as e4m3", "e5m2", "use the model's unquantised weights"});
  }
  for (const SafetensorsEntry* const weight : weights) {
    const std::string place = place_of(where, weight->name);
    if (!stored)
      throw InputError({place, "quantization_config in config.json, which says how FP8 is scaled", "none",
                        "Fetch config.json again"});
    if (!weight->name.ends_with(kWeight) || weight->shape.size() != 2)
      throw UnsupportedError({place, "one matrix in FP8 for each linear layer and each expert",
                              text_of("shape ", shape_text(weight->shape)),
                              "Save the model with transformers' save_pretrained, which writes experts one by one"});
    const SafetensorsEntry* scale = nullptr;
    for (const char* const end : kScaleNames) {
      const auto found = tensors.find(weight->name + end);
      if (found == tensors.end()) continue;
      if (scale != nullptr)
        throw InputError({place, "one tensor of scales",
                          "'" + printable(scale->name) + "' and '" + printable(found->first) + "'", ""});
      scale = found->second;
    }
    if (scale == nullptr)
      throw InputError({place_of(where, weight->name + kScaleNames[0]),
                        text_of("the scales of '", printable(weight->name), "'"), "no such tensor",
                        "Fetch the model again"});
    parts.push_back(joined(*weight, *scale, stored->form, where));
    tensors.erase(scale->name);
    tensors[weight->name] = &parts.back();
  }
  if (!stored) return;
  std::erase_if(tensors, [](const auto& item) {
    return std::ranges::any_of(kUnread, [&](const char* end) { return item.first.ends_with(end); });
  });
  for (const auto& [name, entry] : tensors)
    for (const char* const end : kScaleNames)
      if (name.ends_with(std::string(kWeight) + end))
        throw InputError({place_of(where, name), "its matrix in FP8 beside it", "none", "Fetch the model again"});
}

bool is_fp8(const SafetensorsEntry& entry) {
  return entry.quantised && entry.quantised->form().kind == quantised::Kind::fp8;
}

SafetensorsEntry in_bfloat16(const SafetensorsEntry& joined) {
  SafetensorsEntry out = joined;
  out.type = TensorType::BF16;
  out.bytes = out.count * bytes_of(out.type);
  out.quantised = nullptr;
  out.unpack = [joined](std::byte* to) {
    std::vector<std::byte> room;
    convert_values(joined.type, values_of(joined, room), DType::bfloat16, to, joined.count);
  };
  return out;
}

}  // namespace espalier
