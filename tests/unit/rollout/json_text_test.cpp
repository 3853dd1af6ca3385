#include "espalier/rollout/json_text.h"

#include <gtest/gtest.h>

#include <regex>

#include "espalier/base/json.h"
#include "espalier/base/random.h"

namespace espalier {
namespace {

TEST(JsonText, AcceptsWhatAnotherParserAccepts) {
  const char kAlphabet[] = "{}[]\",:0123456789.eE+-\\u/ntruefalsl \t";
  const std::regex huge("[eE]\\+?[0-9]*[3-9][0-9]{2}");
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 100'000; ++seed) {
    Random random(seed);
    std::string text;
    // Start from something well-formed half of the time, so that acceptance is tested too.
    if (random.chance(0.5)) text = R"({"a":[1,-0.5e+3,{"b":null}],"c":"x\u00e9\n","d":true})";
    const std::int64_t edits = text.empty() ? random.integer(1, 8) : random.integer(0, 2);
    for (std::int64_t i = 0; i < edits; ++i) {
      const auto at = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(text.size())));
      const char c = kAlphabet[random.integer(0, sizeof kAlphabet - 2)];
      if (at < text.size() && random.chance(0.5))
        text[at] = c;
      else
        text.insert(at, 1, c);
    }
    // The other one refuses lone surrogates and numbers above the largest double, both of which the grammar allows.
    if (text.find("\\ud") != std::string::npos || text.find("\\uD") != std::string::npos) continue;
    if (std::regex_search(text, huge)) continue;
    const bool other = Json::accept(text);
    accepted += other;
    ASSERT_EQ(is_json(text), other) << text << " seed " << seed;
  }
  EXPECT_GT(accepted, 5'000);
}

TEST(JsonText, QuotesSoThatAnotherParserReadsTheSame) {
  std::string text;
  for (int c = 0; c < 128; ++c) text += static_cast<char>(c);
  text += "\xc3\xa9";
  EXPECT_EQ(Json::parse(json_quoted(text)).get<std::string>(), text);
}

TEST(JsonText, WalksTheMembersOfAnObject) {
  JsonMembers members(R"( { "a" : [1, {"x":2}] , "b\"":"}" } )");
  std::string_view key, value;
  ASSERT_TRUE(members.next(key, value));
  EXPECT_EQ(key, "\"a\"");
  EXPECT_EQ(value, R"([1, {"x":2}])");
  ASSERT_TRUE(members.next(key, value));
  EXPECT_EQ(key, R"("b\"")");
  EXPECT_EQ(value, "\"}\"");
  EXPECT_FALSE(members.next(key, value));
}

}  // namespace
}  // namespace espalier
