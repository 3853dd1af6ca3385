#include "espalier/base/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "espalier/base/error.h"

namespace espalier::fp8 {
namespace {

constexpr std::size_t kMagnitudes = 127;  // without NaN

// The values of codes 0, 1, ... without a sign, ascending.
constexpr std::array<float, kMagnitudes> magnitudes() {
  std::array<float, kMagnitudes> out{};
  for (std::size_t code = 0; code < out.size(); ++code) {
    const std::size_t exponent = code >> 3U, mantissa = code & 7U;
    float value = exponent == 0 ? static_cast<float>(mantissa) : static_cast<float>(8 + mantissa);
    for (std::size_t e = std::max<std::size_t>(exponent, 1); e < 10; ++e) value /= 2;
    for (std::size_t e = 10; e < exponent; ++e) value *= 2;
    out[code] = value;
  }
  return out;
}

constexpr std::array<float, 256> values() {
  std::array<float, 256> out{};
  const std::array<float, kMagnitudes> positive = magnitudes();
  for (std::size_t code = 0; code < positive.size(); ++code)
    out[code] = positive[code], out[code + 128] = -positive[code];
  out[127] = out[255] = std::numeric_limits<float>::quiet_NaN();
  return out;
}

constexpr std::array<float, kMagnitudes> kMagnitudeOf = magnitudes();
constexpr std::array<float, 256> kValues = values();
static_assert(kValues[1] == 0x1p-9F && kValues[8] == 0x1p-6F && kValues[0x38] == 1 && kValues[0xfe] == -448);

Header header_of(const std::byte* row) {
  Header header;
  std::memcpy(&header, row, sizeof(header));
  return header;
}

// The most scales that a row of so many columns has, wherever it begins in a block.
std::int64_t scales_of_row(std::int64_t columns, std::int64_t block_columns) {
  return (columns + block_columns - 2) / block_columns + 1;
}

}  // namespace

float value_of(std::uint8_t code) { return kValues[code]; }

std::uint8_t code_of(float value) {
  const float size = std::abs(value);
  const auto above = std::ranges::lower_bound(kMagnitudeOf, size);
  auto code = static_cast<std::size_t>(above - kMagnitudeOf.begin());
  if (above == kMagnitudeOf.end()) {
    code = kMagnitudes - 1;
  } else if (*above != size) {
    const float up = *above - size, down = size - *(above - 1);
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 128U : 0U));
}

std::int64_t row_bytes(std::int64_t columns, std::int64_t block_columns) {
  return static_cast<std::int64_t>(sizeof(Header)) + 4 * scales_of_row(columns, block_columns) + (columns + 3) / 4 * 4;
}

void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out) {
  const Header header = header_of(row);
  const std::byte* const scales = row + sizeof(Header);
  const auto* const codes =
      reinterpret_cast<const std::uint8_t*>(scales + 4 * scales_of_row(header.row.columns, header.block_columns));
  for (std::int64_t i = first, end = first + count; i < end;) {
    const std::int64_t block = (header.row.place + i) / header.block_columns,
                       last = std::min(end, (block + 1) * header.block_columns - header.row.place);
    float scale;
    std::memcpy(&scale, scales + 4 * block, sizeof(scale));
    for (; i < last; ++i) *out++ = kValues[codes[i]] * scale;
  }
}

quantised::Form Matrix::form() const {
  return {.kind = quantised::Kind::fp8, .block_rows = block_rows, .block_columns = block_columns};
}

void Matrix::write_row(std::int64_t row, std::int64_t begin, std::int64_t end, std::int64_t width,
                       std::byte* out) const {
  const std::int64_t first = begin / block_columns;
  const Header header{.row = {.columns = static_cast<std::int32_t>(width),
                              .kind = quantised::Kind::fp8,
                              .place = static_cast<std::uint16_t>(begin - first * block_columns)},
                      .block_columns = block_columns,
                      .unused = 0};
  std::memset(out, 0, static_cast<std::size_t>(row_bytes(width, block_columns)));
  std::memcpy(out, &header, sizeof(header));
  if (begin == end) return;
  std::byte* const to = out + sizeof(header);
  const std::int64_t blocks = (end - 1) / block_columns - first + 1;
  std::memcpy(to, scales_of(row) + first, static_cast<std::size_t>(4 * blocks));
  const std::uint8_t* const from = codes + row * columns;
  if (const auto* const bad = std::find_if(from + begin, from + end, is_nan); bad != from + end)
    throw InputError({where, "codes of numbers", text_of("NaN at row ", row, ", column ", bad - from),
                      "The weights are damaged; fetch or write them again"});
  std::memcpy(to + 4 * scales_of_row(width, block_columns), from + begin, static_cast<std::size_t>(end - begin));
}

std::span<const std::byte> Matrix::stored_codes() const {
  return {reinterpret_cast<const std::byte*>(codes), static_cast<std::size_t>(rows * columns)};
}

std::shared_ptr<const quantised::Matrix> Matrix::part(std::int64_t first, std::int64_t count) const {
  auto out = std::make_shared<Matrix>(*this);
  if (!made_codes.empty()) out->codes = out->made_codes.data();
  out->codes += first * columns, out->first_row += first, out->rows = count;
  return out;
}

namespace {

// The largest number of a block becomes 448.
std::shared_ptr<const quantised::Matrix> quantise(const quantised::Form& form, std::int64_t rows, std::int64_t columns,
                                                  const std::function<void(std::int64_t n, float* out)>& row) {
  auto out = std::make_shared<Matrix>();
  out->rows = rows, out->columns = columns, out->where = "drawn weights";
  out->block_rows = form.block_rows, out->block_columns = form.block_columns;
  out->made_codes.resize(static_cast<std::size_t>(rows * columns));
  out->codes = out->made_codes.data();
  const std::int64_t together = std::min<std::int64_t>(rows, form.block_rows);
  std::vector<float> numbers(static_cast<std::size_t>(together * columns));
  for (std::int64_t first = 0; first < rows; first += together) {
    const std::int64_t height = std::min(together, rows - first);
    for (std::int64_t n = 0; n < height; ++n) row(first + n, numbers.data() + n * columns);
    for (std::int64_t begin = 0; begin < columns; begin += form.block_columns) {
      const std::int64_t end = std::min(columns, begin + form.block_columns);
      float most = 0;
      for (std::int64_t n = 0; n < height; ++n)
        for (std::int64_t c = begin; c < end; ++c)
          most = std::max(most, std::abs(numbers[static_cast<std::size_t>(n * columns + c)]));
      const float scale = most == 0 ? 1 : most / kMagnitudeOf.back();
      out->scales.push_back(scale);
      for (std::int64_t n = 0; n < height; ++n)
        for (std::int64_t c = begin; c < end; ++c)
          out->made_codes[static_cast<std::size_t>((first + n) * columns + c)] =
              code_of(numbers[static_cast<std::size_t>(n * columns + c)] / scale);
    }
  }
  return out;
}

}  // namespace

quantised::Rows rows() {
  return {
      .word = "fp8",
      .name = "FP8",
      .whole_columns = 1,
      .left_out_member = "modules_to_not_convert",
      .quantises = false,
      .usual = {},
      .bytes = [](const quantised::Form& form, std::int64_t columns) { return row_bytes(columns, form.block_columns); },
      .values = row_values,
      .quantise = quantise};
}

}  // namespace espalier::fp8
