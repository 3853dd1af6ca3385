// Damaged files of rollouts: whatever the bytes, the reader returns records that keep every promise of rollout.h, or
// throws an InputError or UnsupportedError with a place. Never anything else.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/random.h"
#include "espalier/rollout/reader.h"
#include "espalier/rollout/writer.h"
#include "tests/support/covering.h"
#include "tests/support/make_rollouts.h"
#include "tests/support/source_dir.h"

namespace espalier {
namespace {

constexpr std::int64_t kVocabulary = 1000;

std::string golden(const std::string& name) {
  std::ifstream in(testing::source_dir() + "/tests/golden/" + name, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_FALSE(text.empty()) << name;
  return text;
}

void expect_kept_promises(const Rollout& rollout) {
  ASSERT_FALSE(rollout.prompt_ids.empty());
  for (const auto* ids : {&rollout.prompt_ids, &rollout.response_ids})
    for (const std::int32_t id : *ids) ASSERT_TRUE(id >= 0 && id < kVocabulary) << id;
  const std::size_t length = rollout.response_ids.size();
  ASSERT_EQ(rollout.loss_mask.size(), length);
  for (const std::uint8_t kept : rollout.loss_mask) ASSERT_LE(kept, 1);
  for (const auto* series :
       {&rollout.advantages, &rollout.old_logprobs, &rollout.ref_logprobs, &rollout.values, &rollout.returns}) {
    ASSERT_TRUE(series->empty() || series->size() == length);
    for (const double value : *series) ASSERT_TRUE(std::isfinite(value));
  }
  for (const auto* series : {&rollout.rollout_logprobs, &rollout.full_logprobs}) {
    ASSERT_TRUE(series->empty() || series->size() == length);
    for (const double value : *series) ASSERT_TRUE(std::isfinite(value) || std::isnan(value));  // NaN: not recorded
  }
  ASSERT_TRUE(!rollout.reward || std::isfinite(*rollout.reward));
  ASSERT_TRUE(std::isfinite(rollout.temperature) && rollout.temperature > 0);
}

enum class Outcome { read, refused };

Outcome try_to_read(const std::string& text) {
  ReadOptions options;
  options.vocabulary = kVocabulary;
  try {
    const RolloutFile file = parse_rollouts(text, "hostile", options);
    EXPECT_FALSE(file.rollouts.empty());
    for (const Rollout& rollout : file.rollouts) expect_kept_promises(rollout);
    return Outcome::read;
  } catch (const InputError& error) {
    EXPECT_TRUE(error.text().where.starts_with("hostile")) << error.what();
  } catch (const UnsupportedError& error) {
    EXPECT_TRUE(error.text().where.starts_with("hostile")) << error.what();
  }
  return Outcome::refused;
}

// The file as `text`, each line parsed by another library: is any line broken?
bool every_line_is_an_object(const std::string& text) {
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    if (line.find_first_not_of(" \t\r") != std::string::npos && !Json::accept(line)) return false;
    begin = end + 1;
  }
  return true;
}

std::string damaged(std::string text, Random& random) {
  static const std::vector<std::string> kPieces = {"NaN",         "1e999",
                                                   "-1",          "[[[[",
                                                   "]]",          "{",
                                                   "}",           "\"",
                                                   "\\",          "null",
                                                   ",",           ":",
                                                   "99999999999", "\"prompt_ids\":",
                                                   "\n",          std::string(1, '\0'),
                                                   "\xff",        "1.5"};
  const std::int64_t edits = random.integer(1, 4);
  for (std::int64_t i = 0; i < edits && !text.empty(); ++i) {
    const auto at = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(text.size()) - 1));
    switch (random.integer(0, 4)) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random.integer(0, 7)));
        break;
      case 1:
        text[at] = static_cast<char>(random.integer(0, 255));
        break;
      case 2:
        text.erase(at, static_cast<std::size_t>(random.integer(1, 20)));
        break;
      case 3:
        text.insert(
            at, kPieces[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(kPieces.size()) - 1))]);
        break;
      default:
        text.insert(at, text.substr(static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(at))),
                                    static_cast<std::size_t>(random.integer(1, 30))));
    }
  }
  return text;
}

TEST(HostileRollouts, CutAtEveryByte) {
  for (const char* name : {"neutral.jsonl", "train_data_step3.jsonl"}) {
    const std::string whole = golden(name);
    EXPECT_EQ(try_to_read(whole), Outcome::read);
    for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
      SCOPED_TRACE(std::string(name) + " cut to " + std::to_string(bytes) + " bytes");
      const std::string cut = whole.substr(0, bytes);
      // Readable only where the cut falls between records: behind a closing brace or a newline.
      const bool between = bytes > 0 && every_line_is_an_object(cut);
      EXPECT_EQ(try_to_read(cut), between ? Outcome::read : Outcome::refused);
    }
  }
}

TEST(HostileRollouts, EveryBitFlippedOnce) {
  const std::string whole = golden("neutral.jsonl");
  for (std::size_t at = 0; at < whole.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      SCOPED_TRACE("byte " + std::to_string(at) + " bit " + std::to_string(bit));
      if (try_to_read(flipped) == Outcome::read) {
        EXPECT_TRUE(every_line_is_an_object(flipped)) << flipped;
      }
    }
}

// Other seeds every day.
TEST(HostileRollouts, RandomDamageForHalfASecond) {
  std::vector<std::string> corpus = {golden("neutral.jsonl"), golden("train_data_step3.jsonl")};
  std::string generated;
  for (const Rollout& rollout : testing::make_rollouts(testing::any_options(1), 1))
    generated += rollout_json(rollout) + "\n";
  corpus.push_back(generated);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  std::int64_t read = 0, refused = 0;
  const std::uint64_t first = testing::seed_of_day() * 1'000'000;
  for (std::uint64_t seed = first; seed < first + 1'000'000 && std::chrono::steady_clock::now() < end; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::string text = damaged(corpus[seed % corpus.size()], random);
    if (try_to_read(text) == Outcome::read) {
      ++read;
      // Underflow and lone surrogates aside, what is read is JSON for another parser too.
      EXPECT_TRUE(every_line_is_an_object(text) || text.find("\\u") != std::string::npos ||
                  text.find_first_of("eE") != std::string::npos)
          << text;
    } else {
      ++refused;
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(read, 10);
}

std::string rewritten(const std::string& bytes) {
  std::string out;
  for (const Rollout& rollout : parse_rollouts(bytes, "hostile").rollouts) out += rollout_json(rollout) + "\n";
  return out;
}

TEST(HostileRollouts, DamagedGzip) {
  const auto path =
      std::filesystem::temp_directory_path() / ("espalier_hostile_" + std::to_string(::getpid()) + ".jsonl.gz");
  testing::write_jsonl(path, testing::make_rollouts(testing::any_options(4), 4));
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  std::filesystem::remove(path);
  const std::string text = rewritten(whole);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_EQ(try_to_read(whole.substr(0, bytes)), Outcome::refused) << bytes;
  for (std::size_t at = 0; at < whole.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      // The header's time and system and the unused bits behind the last code change nothing: then the text is whole.
      if (try_to_read(flipped) == Outcome::read) {
        EXPECT_EQ(rewritten(flipped), text) << "byte " << at << " bit " << bit;
      }
    }
}

TEST(HostileRollouts, AbsurdShapes) {
  const auto refused = [](const std::string& text) { EXPECT_EQ(try_to_read(text), Outcome::refused); };
  refused(std::string(1 << 20, '['));
  refused(std::string(1 << 20, '{'));
  refused(std::string(1 << 20, '"'));
  refused(std::string(1 << 20, '\0'));
  refused(std::string(1 << 20, '1'));
  refused(std::string(1 << 20, ' '));
  std::string deep = R"({"prompt_ids":[1],"response_ids":[2],"meta":)";
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  refused(deep);
  refused(deep + "1" + std::string(100'001, '}'));
  std::string keys = R"({"prompt_ids":[1],"response_ids":[2])";
  for (int i = 0; i < 2000; ++i) keys += ",\"k" + std::to_string(i) + "\":" + std::to_string(i);
  EXPECT_EQ(try_to_read(keys + "}"), Outcome::read);
  refused(keys + ",\"k7\":1}");
}

}  // namespace
}  // namespace espalier
