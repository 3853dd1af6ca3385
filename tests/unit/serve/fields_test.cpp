// Members of JSON requests.
#include "espalier/serve/fields.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

int status_of(const std::string& body) {
  try {
    Fields::of_body(body);
  } catch (const Refused& refused) {
    return refused.status;
  }
  return 200;
}

TEST(Fields, BodiesAreObjects) {
  for (const std::string body : {"", "{", "[]", "1", "null", "{\"a\":}", "{} x"})
    EXPECT_EQ(status_of(body), 400) << body;
  EXPECT_EQ(status_of("{}"), 200);
}

TEST(Fields, DepthIsBounded) {
  const auto nested = [](int depth) {
    return "{\"a\":" + std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']') + "}";
  };
  EXPECT_EQ(status_of(nested(31)), 200);
  EXPECT_EQ(status_of(nested(32)), 400);
  EXPECT_EQ(status_of(nested(1'000'000)), 400);
  EXPECT_EQ(status_of(R"({"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"[["})"), 200);  // brackets of a text
}

TEST(Fields, TypesAndRangesAreChecked) {
  const Fields fields = Fields::of_body(
      R"({"text": "t", "whole": 7, "half": 0.5, "large": 18446744073709551615, "yes": true, "null": null, "list": [1], "object": {"a": 1}})");
  EXPECT_EQ(fields.text("text"), "t");
  EXPECT_EQ(fields.integer("whole", 0, 7), 7);
  EXPECT_EQ(fields.number("half", 1), 0.5);
  EXPECT_EQ(fields.number("whole", 1), 7);
  EXPECT_TRUE(fields.flag("yes", false));
  EXPECT_EQ(fields.object("object").at("a"), 1);
  EXPECT_EQ(fields.text("null", "otherwise"), "otherwise");
  EXPECT_EQ(fields.integer("absent", 0, 9, 4), 4);
  EXPECT_TRUE(fields.object("absent").empty());
  EXPECT_THROW(fields.text("whole"), InputError);
  EXPECT_THROW(fields.text("absent"), InputError);
  EXPECT_THROW(fields.integer("half", 0, 9), InputError);
  EXPECT_THROW(fields.integer("whole", 0, 6), InputError);
  EXPECT_THROW(fields.integer("large", 0, INT64_MAX), InputError);
  EXPECT_THROW(fields.integer("text", 0, 9), InputError);
  EXPECT_THROW(fields.number("text", 0), InputError);
  EXPECT_THROW(fields.flag("whole", false), InputError);
  EXPECT_THROW(fields.object("list"), InputError);
}

}  // namespace
}  // namespace espalier::serve
