#include "espalier/serve/wire.h"

#include <bit>

#include "espalier/base/error.h"

namespace espalier::serve {

static_assert(std::endian::native == std::endian::little, "tensors are little-endian on the wire");

namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kDelimited = 2, kFixed32 = 5 };

[[noreturn]] void damaged(const char* expected, const std::string& got) {
  throw InputError({"the message", expected, got, ""});
}

bool is_utf8(std::string_view text) {
  std::size_t more = 0;
  unsigned low = 0x80, high = 0xbf;  // of the next continuation byte
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (more > 0) {
      if (byte < low || byte > high) return false;
      low = 0x80, high = 0xbf, --more;
    } else if (byte >= 0xc2 && byte <= 0xdf) {
      more = 1;
    } else if (byte >= 0xe0 && byte <= 0xef) {
      more = 2, low = byte == 0xe0 ? 0xa0 : 0x80, high = byte == 0xed ? 0x9f : 0xbf;
    } else if (byte >= 0xf0 && byte <= 0xf4) {
      more = 3, low = byte == 0xf0 ? 0x90 : 0x80, high = byte == 0xf4 ? 0x8f : 0xbf;
    } else if (byte >= 0x80) {
      return false;
    }
  }
  return more == 0;
}

}  // namespace

std::uint64_t WireReader::take_varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (rest_.empty()) damaged("a whole number", "the end of the data");
    const auto byte = static_cast<std::uint64_t>(rest_.front());
    rest_ = rest_.subspan(1);
    value |= (byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  damaged("a number of at most ten bytes", "a longer one");
}

Bytes WireReader::take(std::size_t count) {
  if (count > rest_.size()) damaged("all bytes of a field", text_of(rest_.size(), " of ", count));
  const Bytes out = rest_.first(count);
  rest_ = rest_.subspan(count);
  return out;
}

bool WireReader::next() {
  if (rest_.empty()) return false;
  const std::uint64_t key = take_varint();
  if (key >> 3 == 0 || key >> 32 != 0) damaged("a field's number", text_of(key >> 3));
  field_ = static_cast<int>(key >> 3);
  const auto fixed = [&](std::size_t count) {
    const Bytes bits = take(count);
    value_ = 0;
    std::memcpy(&value_, bits.data(), count);
  };
  switch (key & 7) {
    case kVarint:
      form_ = Form::varint;
      value_ = take_varint();
      return true;
    case kFixed64:
      form_ = Form::fixed64;
      fixed(8);
      return true;
    case kDelimited: {
      form_ = Form::delimited;
      const std::uint64_t count = take_varint();
      if (count > rest_.size()) damaged("all bytes of a field", text_of(rest_.size(), " of ", count));
      bytes_ = take(static_cast<std::size_t>(count));
      return true;
    }
    case kFixed32:
      form_ = Form::fixed32;
      fixed(4);
      return true;
    default:
      damaged("a field of proto3", text_of("wire type ", key & 7));
  }
}

void WireReader::require(Form form) const {
  if (form_ != form) damaged("the field's own wire type", text_of("another one in field ", field_));
}

std::uint64_t WireReader::varint() const {
  require(Form::varint);
  return value_;
}

double WireReader::number() const {
  require(Form::fixed64);
  return std::bit_cast<double>(value_);
}

Bytes WireReader::bytes() const {
  require(Form::delimited);
  return bytes_;
}

std::string WireReader::text() const {
  const Bytes view = bytes();
  std::string out(reinterpret_cast<const char*>(view.data()), view.size());
  if (!is_utf8(out)) damaged("text in UTF-8", text_of("other bytes in field ", field_));
  return out;
}

void WireReader::add_varints(std::vector<std::int64_t>& out) const {
  if (form_ == Form::varint) return out.push_back(static_cast<std::int64_t>(value_));
  WireReader packed(bytes());
  while (!packed.rest_.empty()) out.push_back(static_cast<std::int64_t>(packed.take_varint()));
}

void WireWriter::add_varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
  out_ += static_cast<char>(value);
}

void WireWriter::varint(int field, std::uint64_t value) {
  key(field, kVarint);
  add_varint(value);
}

void WireWriter::number(int field, double value) {
  key(field, kFixed64);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  out_.append(reinterpret_cast<const char*>(&bits), sizeof bits);
}

void WireWriter::bytes(int field, Bytes value) {
  key(field, kDelimited);
  add_varint(value.size());
  out_.append(reinterpret_cast<const char*>(value.data()), value.size());
}

void WireWriter::packed_varints(int field, std::span<const std::int64_t> values) {
  if (values.empty()) return;
  WireWriter packed;
  for (const std::int64_t value : values) packed.add_varint(static_cast<std::uint64_t>(value));
  message(field, packed);
}

}  // namespace espalier::serve
