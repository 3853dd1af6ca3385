// Protobuf as bytes. Expected bytes come from protobuf.dev's page "Encoding".
#include "espalier/serve/wire.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

using namespace std::string_literals;

WireReader first_field(const std::string& message) {
  WireReader reader(bytes_of_text(message));
  EXPECT_TRUE(reader.next());
  return reader;
}

TEST(Wire, WritesAsPublished) {
  WireWriter writer, inner;
  writer.varint(1, 150);
  EXPECT_EQ(writer.take(), "\x08\x96\x01"s);
  writer.text(2, "testing");
  EXPECT_EQ(writer.take(), "\x12\x07testing"s);
  inner.varint(1, 150);
  writer.message(3, inner);
  EXPECT_EQ(writer.take(), "\x1a\x03\x08\x96\x01"s);
  const std::vector<std::int64_t> numbers{3, 270, 86942};
  writer.packed_varints(6, numbers);
  EXPECT_EQ(writer.take(), "\x32\x06\x03\x8e\x02\x9e\xa7\x05"s);
}

TEST(Wire, ReadsWhatItWrote) {
  WireWriter writer;
  writer.varint(1, std::uint64_t(-1));
  writer.number(2, -0.1);
  writer.text(3, "gr\xc3\xbc\xc3\x9f");
  const std::vector<std::int64_t> numbers{0, -1, 1 << 20};
  writer.packed_varints(1000, numbers);
  const std::string message = writer.take();
  WireReader reader(bytes_of_text(message));
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.varint(), std::uint64_t(-1));
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.number(), -0.1);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.text(), "gr\xc3\xbc\xc3\x9f");
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.field(), 1000);
  std::vector<std::int64_t> read;
  reader.add_varints(read);
  EXPECT_EQ(read, numbers);
  EXPECT_FALSE(reader.next());
}

TEST(Wire, DamagedMessagesAreRefused) {
  for (const std::string& message : {
           "\x08"s,                                              // no value
           "\x08\x80\x80"s,                                      // a number without an end
           "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"s,  // of eleven bytes
           "\x12\x05"
           "abc"s,                                       // fewer bytes than stated
           "\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f"s,  // a length beyond all memory
           "\x09\x01\x02"s, "\x0d\x01"s,                 // short fixed numbers
           "\x0b"s, "\x0c"s, "\x0e"s, "\x0f"s,           // groups, and wire types that do not exist
           "\x00\x01"s,                                  // field 0
       }) {
    WireReader reader(bytes_of_text(message));
    EXPECT_THROW(reader.next(), InputError) << message.size();
  }
}

TEST(Wire, AFieldOfAnotherFormIsRefused) {
  const std::string number = "\x08\x01"s, bytes = "\x12\x01z"s, fixed = "\x0d\x01\x02\x03\x04"s;
  EXPECT_THROW(first_field(number).bytes(), InputError);
  EXPECT_THROW(first_field(bytes).varint(), InputError);
  EXPECT_THROW(first_field(fixed).number(), InputError);
}

TEST(Wire, TextsAreUtf8) {
  for (const std::string& text :
       {"\xff"s, "\xc0\xaf"s, "\xe0\x80\x80"s, "\xed\xa0\x80"s, "\xf4\x90\x80\x80"s, "\xe2\x82"s}) {
    WireWriter writer;
    writer.text(1, text);
    const std::string message = writer.take();
    EXPECT_THROW(first_field(message).text(), InputError) << message;
  }
}

}  // namespace
}  // namespace espalier::serve
