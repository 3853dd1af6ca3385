// Protobuf messages as bytes: a reader that never leaves its span, and a writer.
//
// The service reads one request and writes two answers, of four wire types. A reader by hand gives views of tensors
// without copies, bounds every length, and needs no second protobuf beside that of libtorch.
// Source: protobuf.dev, "Encoding".
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier::serve {

using Bytes = std::span<const std::byte>;
inline Bytes bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

class WireReader {
 public:
  explicit WireReader(Bytes message) : rest_(message) {}

  // Moves to the next field; false at the end. Groups, which proto3 has not, are damaged data. Errors: InputError.
  bool next();
  int field() const { return field_; }

  // The value of the current field, which must have this form. Errors: InputError.
  std::uint64_t varint() const;
  double number() const;     // a fixed64
  Bytes bytes() const;       // of a string, bytes or a message
  std::string text() const;  // UTF-8
  // The numbers of a repeated varint field, packed or the one of an element.
  void add_varints(std::vector<std::int64_t>& out) const;

 private:
  enum class Form { varint, fixed64, delimited, fixed32 };
  std::uint64_t take_varint();
  Bytes take(std::size_t count);
  void require(Form form) const;

  Bytes rest_;
  int field_ = 0;
  Form form_ = Form::varint;
  std::uint64_t value_ = 0;  // of a varint, or the bits of a fixed number
  Bytes bytes_;
};

class WireWriter {
 public:
  void varint(int field, std::uint64_t value);
  void number(int field, double value);
  void bytes(int field, Bytes value);
  void text(int field, std::string_view value) { bytes(field, bytes_of_text(value)); }
  void message(int field, const WireWriter& value) { text(field, value.out_); }
  void packed_varints(int field, std::span<const std::int64_t> values);
  template <class T>
  void values(int field, std::span<const T> values) {  // little-endian, as this machine has them
    bytes(field, std::as_bytes(values));
  }

  std::string take() { return std::move(out_); }
  std::size_t size() const { return out_.size(); }

 private:
  void key(int field, int type) { add_varint(static_cast<std::uint64_t>(field) << 3 | static_cast<unsigned>(type)); }
  void add_varint(std::uint64_t value);

  std::string out_;
};

}  // namespace espalier::serve
