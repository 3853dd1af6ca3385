#include "espalier/base/nf4.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <shared_mutex>

#include "espalier/base/error.h"
#include "espalier/base/float16.h"

#ifdef __FMA__
#error "a fused multiply-add would give other numbers than bitsandbytes'"
#endif

namespace espalier::nf4 {

// Quantiles of a normal distribution, bitsandbytes' digits.
const std::array<float, 16> kCodes{-1.0F,
                                   -0.6961928009986877F,
                                   -0.5250730514526367F,
                                   -0.39491748809814453F,
                                   -0.28444138169288635F,
                                   -0.18477343022823334F,
                                   -0.09105003625154495F,
                                   0.0F,
                                   0.07958029955625534F,
                                   0.16093020141124725F,
                                   0.24611230194568634F,
                                   0.33791524171829224F,
                                   0.44070982933044434F,
                                   0.5626170039176941F,
                                   0.7229568362236023F,
                                   1.0F};

namespace {

constexpr std::uint8_t kZero = 7;  // the code of 0

std::int64_t padded(std::int64_t bytes) { return (bytes + 3) / 4 * 4; }
// Factors that the blocks of a row may use, wherever it begins.
std::int64_t factors_of(std::int64_t blocks) { return (blocks + kNestedBlock - 2) / kNestedBlock + 1; }
std::int64_t absmax_bytes(std::int64_t blocks, bool nested) {
  return nested ? 4 * factors_of(blocks) + padded(blocks) : 4 * blocks;
}

Header header_of(const std::byte* row) {
  Header header;
  std::memcpy(&header, row, sizeof(header));
  return header;
}

struct Maps {
  std::shared_mutex mutex;
  std::deque<Map> known;  // references stay valid
};
Maps& maps() {
  static Maps of_process;
  return of_process;
}
const Map& map_at(std::uint16_t index) {
  Maps& all = maps();
  const std::shared_lock lock(all.mutex);
  return all.known[index];
}

float rounded(float x, Rounding rounding) {
  switch (rounding) {
    case Rounding::bfloat16:
      return static_cast<float>(bfloat16(x));
    case Rounding::float16:
      return static_cast<float>(float16(x));
    case Rounding::float32:
      break;
  }
  return x;
}

// The place of the nearest of ascending numbers.
template <std::size_t n>
std::uint8_t nearest(const std::array<float, n>& ascending, float x) {
  const auto above = std::ranges::lower_bound(ascending, x);
  if (above == ascending.begin()) return 0;
  if (above == ascending.end()) return n - 1;
  const bool lower = x - *(above - 1) <= *above - x;
  return static_cast<std::uint8_t>(above - ascending.begin() - (lower ? 1 : 0));
}

}  // namespace

std::int64_t row_bytes(std::int64_t columns, bool nested) {
  return static_cast<std::int64_t>(sizeof(Header)) + absmax_bytes(columns / kBlock, nested) + columns / 2;
}

const std::uint8_t* codes_of(const std::byte* row) {
  const Header header = header_of(row);
  return reinterpret_cast<const std::uint8_t*>(row + sizeof(Header) +
                                               absmax_bytes(header.row.columns / kBlock, header.nested));
}

void block_values(const std::byte* row, std::int64_t first, std::int64_t count, float* values) {
  const Header header = header_of(row);
  const std::int64_t blocks = header.row.columns / kBlock;
  const std::byte* const factors = row + sizeof(Header);
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(factors + 4 * factors_of(blocks));
  const Map* const map = header.nested ? &map_at(header.map) : nullptr;
  for (std::int64_t b = first; b < first + count; ++b, values += kCodes.size()) {
    float absmax;
    std::memcpy(&absmax, factors + 4 * (header.nested ? (header.row.place + b) / kNestedBlock : b), sizeof(absmax));
    if (map != nullptr) absmax = (*map)[codes[b]] * absmax + header.offset;
    for (std::size_t c = 0; c < kCodes.size(); ++c) values[c] = rounded(kCodes[c] * absmax, header.rounding);
  }
}

void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out) {
  const std::uint8_t* const codes = codes_of(row);
  std::array<float, kCodes.size()> values;
  for (std::int64_t i = first, end = first + count; i < end;) {
    const std::int64_t block = i / kBlock, last = std::min(end, (block + 1) * kBlock);
    block_values(row, block, 1, values.data());
    for (; i < last; ++i) *out++ = values[i % 2 == 0 ? codes[i / 2] >> 4U : codes[i / 2] & 15U];
  }
}

std::uint16_t index_of(const Map& map) {
  Maps& all = maps();
  const std::unique_lock lock(all.mutex);
  auto found = std::ranges::find(all.known, map);
  if (found == all.known.end()) found = all.known.insert(all.known.end(), map);
  return static_cast<std::uint16_t>(found - all.known.begin());
}

// Means of neighbours among 2^i + 1 even steps from 0.1 to 1, times 10^(i - 6), i = 0 ... 6; with both signs, 0 and 1.
// In float32, as torch.linspace counts: from both ends.
const Map& standard_map() {
  static const Map map = [] {
    std::vector<float> numbers{0, 1};
    for (int i = 0; i < 7; ++i) {
      const int steps = 1 << i;
      const float step = (1.0F - 0.1F) / static_cast<float>(steps);
      const auto boundary = [&](int at) {
        return at < (steps + 1) / 2 ? 0.1F + step * static_cast<float>(at)
                                    : 1.0F - step * static_cast<float>(steps - at);
      };
      const auto scale = static_cast<float>(std::pow(10.0, i - 6));
      for (int at = 0; at < steps; ++at) {
        const float mean = scale * ((boundary(at) + boundary(at + 1)) / 2);
        numbers.push_back(mean), numbers.push_back(-mean);
      }
    }
    std::ranges::sort(numbers);
    Map out;
    std::ranges::copy(numbers, out.begin());
    return out;
  }();
  return map;
}

Matrix quantise(std::int64_t rows, std::int64_t columns, Rounding rounding,
                const std::function<void(std::int64_t n, float* out)>& row) {
  ESPALIER_INTERNAL(columns % kBlock == 0, columns, " columns");
  std::array<float, kCodes.size() - 1> middles;
  for (std::size_t c = 0; c < middles.size(); ++c)
    middles[c] = static_cast<float>((static_cast<double>(kCodes[c]) + kCodes[c + 1]) / 2);
  Matrix out;
  out.rows = rows, out.columns = columns, out.rounding = rounding;
  out.made_codes.resize(static_cast<std::size_t>(rows * columns / 2));
  std::vector<float> absmax(static_cast<std::size_t>(out.blocks())), values(static_cast<std::size_t>(columns));
  std::uint8_t* code = out.made_codes.data();
  for (std::int64_t n = 0, b = 0; n < rows; ++n) {
    row(n, values.data());
    for (const float* x = values.data(); x < values.data() + columns; x += kBlock, ++b) {
      float most = 0;
      for (std::int64_t i = 0; i < kBlock; ++i) most = std::max(most, std::abs(x[i]));
      absmax[static_cast<std::size_t>(b)] = most;
      const float inverse = 1 / most;
      std::array<std::uint8_t, kBlock> codes;
      for (std::int64_t i = 0; i < kBlock; ++i) {
        const float scaled = x[i] * inverse;
        int above = 0;
        for (const float middle : middles) above += scaled > middle ? 1 : 0;
        codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(above);
      }
      if (most == 0) codes.fill(kZero);
      for (std::size_t i = 0; i < codes.size(); i += 2)
        *code++ = static_cast<std::uint8_t>(codes[i] << 4U | codes[i + 1]);
    }
  }
  double sum = 0;
  for (const float a : absmax) sum += a;
  out.offset = static_cast<float>(sum / static_cast<double>(absmax.size()));
  out.map = index_of(standard_map());
  out.made_nested_codes.resize(absmax.size());
  for (std::size_t first = 0; first < absmax.size(); first += kNestedBlock) {
    const std::size_t end = std::min(absmax.size(), first + kNestedBlock);
    float most = 0;
    for (std::size_t b = first; b < end; ++b) most = std::max(most, std::abs(absmax[b] - out.offset));
    for (std::size_t b = first; b < end; ++b)
      out.made_nested_codes[b] = nearest(standard_map(), most == 0 ? 0 : (absmax[b] - out.offset) * (1 / most));
    out.absmax.push_back(most);
  }
  out.codes = out.made_codes.data(), out.nested_codes = out.made_nested_codes.data();
  return out;
}

void write_row(const Matrix& m, std::int64_t row, std::int64_t begin, std::int64_t end, std::byte* out) {
  ESPALIER_INTERNAL(begin % kBlock == 0 && end % kBlock == 0, "columns ", begin, " to ", end);
  const std::int64_t first = (row * m.columns + begin) / kBlock, blocks = (end - begin) / kBlock;
  const Header header{.row = {.columns = static_cast<std::int32_t>(end - begin),
                              .kind = quantised::Kind::nf4,
                              .place = static_cast<std::uint16_t>(m.nested() ? first % kNestedBlock : 0)},
                      .offset = m.offset,
                      .map = m.map,
                      .rounding = m.rounding,
                      .nested = m.nested()};
  std::memcpy(out, &header, sizeof(header));
  std::byte* to = out + sizeof(header);
  std::memset(to, 0, static_cast<std::size_t>(absmax_bytes(blocks, m.nested())));
  const std::int64_t from = m.nested() ? first / kNestedBlock : first,
                     upto = m.nested() ? (first + blocks - 1) / kNestedBlock + 1 : first + blocks;
  std::memcpy(to, m.absmax.data() + from, static_cast<std::size_t>(4 * (upto - from)));
  if (m.nested()) std::memcpy(to + 4 * factors_of(blocks), m.nested_codes + first, static_cast<std::size_t>(blocks));
  to += absmax_bytes(blocks, m.nested());
  std::memcpy(to, m.codes + (row * m.columns + begin) / 2, static_cast<std::size_t>((end - begin) / 2));
}

void Matrix::write_row(std::int64_t row, std::int64_t begin, std::int64_t end, std::int64_t width,
                       std::byte* out) const {
  ESPALIER_INTERNAL_EQ(end - begin, width, "padded columns");
  nf4::write_row(*this, row, begin, end, out);
}

std::span<const std::byte> Matrix::stored_codes() const {
  return {reinterpret_cast<const std::byte*>(codes), static_cast<std::size_t>(rows * columns / 2)};
}

quantised::Rows rows() {
  return {
      .word = "nf4",
      .name = "NF4",
      .whole_columns = kBlock,
      .left_out_member = "llm_int8_skip_modules",
      .quantises = true,
      .usual = {quantised::Kind::nf4, true},
      .bytes = [](const quantised::Form& form, std::int64_t columns) { return row_bytes(columns, form.nested); },
      .values = row_values,
      .quantise =
          [](const quantised::Form&, std::int64_t rows, std::int64_t columns,
             const std::function<void(std::int64_t n, float* out)>& row) -> std::shared_ptr<const quantised::Matrix> {
        return std::make_shared<const Matrix>(quantise(rows, columns, Rounding::bfloat16, row));
      }};
}

}  // namespace espalier::nf4
