// A reader of events, not of a tree: the header has two fixed levels, so depth, repeated members and wrong types are
// refused where they stand and memory stays proportional to what is kept.
#include "espalier/checkpoint/safetensors_header.h"

#include <limits>
#include <unordered_set>

#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {
namespace {

constexpr TensorType kTypes[] = {TensorType::F64,  TensorType::F32,     TensorType::F16,     TensorType::BF16,
                                 TensorType::I64,  TensorType::I32,     TensorType::I16,     TensorType::I8,
                                 TensorType::U64,  TensorType::U32,     TensorType::U16,     TensorType::U8,
                                 TensorType::BOOL, TensorType::F8_E4M3, TensorType::F8_E5M2, TensorType::F8_E8M0};

class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& where) : header_(header), where_(where) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_float(double, const std::string& text) override { unexpected("the number " + printable(text)); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool number_integer(std::int64_t value) override { unexpected("the number " + std::to_string(value)); }

  bool number_unsigned(std::uint64_t value) override {
    if (level_ != Level::array) unexpected("the number " + std::to_string(value));
    if (member_ == "shape") {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail("a shape whose size can be counted", std::to_string(value));
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      offsets_.push_back(value);
    }
    return true;
  }

  bool string(std::string& value) override {
    if (level_ == Level::metadata) {
      header_.metadata[member_] = value;
      return true;
    }
    if (level_ != Level::entry || member_ != "dtype") unexpected("the text '" + printable(value) + "'");
    for (const TensorType type : kTypes) {
      if (value != name_of(type)) continue;
      entry_.type = type;
      return true;
    }
    fail("a known dtype (F64, F32, F16, BF16, I64 ... U8, BOOL, F8_E4M3 ...)", "'" + printable(value) + "'");
  }

  bool start_object(std::size_t) override {
    if (level_ == Level::nothing) {
      level_ = Level::header;
    } else if (level_ == Level::header) {
      level_ = entry_.name == "__metadata__" ? Level::metadata : Level::entry;
      members_.clear();
      offsets_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& name) override {
    if (level_ == Level::header) {
      entry_ = {};
      entry_.name = name;
      if (!names_.insert(name).second) fail("every name once", "this name twice");
      return true;
    }
    member_ = name;
    if (!members_.insert(name).second) fail("every member once", "'" + printable(name) + "' twice");
    if (level_ == Level::entry && name != "dtype" && name != "shape" && name != "data_offsets")
      fail("the members dtype, shape and data_offsets", "'" + printable(name) + "'");
    return true;
  }

  bool start_array(std::size_t) override {
    if (level_ != Level::entry || member_ == "dtype") unexpected("an array");
    level_ = Level::array;
    return true;
  }

  bool end_array() override {
    level_ = Level::entry;
    return true;
  }

  bool end_object() override {
    if (level_ == Level::entry) keep_entry();
    level_ = level_ == Level::header ? Level::nothing : Level::header;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw InputError({where_, "a JSON header", "no valid JSON at byte " + std::to_string(8 + position),
                      "The file is damaged or is not a safetensors file; fetch or write it again"});
  }

 private:
  enum class Level { nothing, header, metadata, entry, array };

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const {
    const std::string place = entry_.name.empty() ? "" : ": tensor '" + printable(entry_.name) + "'";
    throw InputError({where_ + place, expected, got, "The file is damaged; fetch or write it again"});
  }

  [[noreturn]] void unexpected(const std::string& got) const {
    switch (level_) {
      case Level::nothing:
        fail("a JSON object as header", got);
      case Level::header:
        fail("an object with dtype, shape and data_offsets", got);
      case Level::metadata:
        fail("texts in __metadata__", got);
      case Level::entry:
        fail("a text as dtype and arrays as shape and data_offsets", got);
      case Level::array:
        fail("non-negative whole numbers in " + member_, got);
    }
    fail("", got);
  }

  void keep_entry() {
    if (members_.size() != 3)
      fail("the members dtype, shape and data_offsets", std::to_string(members_.size()) + " of them");
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1])
      fail("data_offsets [begin, end]",
           offsets_.size() == 2 ? "an end before the beginning" : std::to_string(offsets_.size()) + " numbers");
    std::int64_t count = 1;
    for (const std::int64_t size : entry_.shape)
      if (__builtin_mul_overflow(count, size, &count))
        fail("a shape whose size can be counted", shape_text(entry_.shape));
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(count, bytes_of(entry_.type), &bytes))
      fail("a shape whose size can be counted", shape_text(entry_.shape));
    if (offsets_[1] - offsets_[0] != static_cast<std::uint64_t>(bytes))
      fail(std::to_string(bytes) + " bytes for " + name_of(entry_.type) + " " + shape_text(entry_.shape),
           "data_offsets that span " + std::to_string(offsets_[1] - offsets_[0]));
    entry_.count = count;
    entry_.bytes = bytes;
    header_.entries.push_back(std::move(entry_));
    header_.offsets.emplace_back(offsets_[0], offsets_[1]);
    entry_ = {};
  }

  SafetensorsHeader& header_;
  const std::string& where_;
  Level level_ = Level::nothing;
  SafetensorsEntry entry_;
  std::string member_;
  std::vector<std::uint64_t> offsets_;
  std::unordered_set<std::string> names_, members_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& where) {
  SafetensorsHeader header;
  HeaderReader reader(header, where);
  Json::sax_parse(text.begin(), text.end(), &reader);
  return header;
}

}  // namespace espalier
