#include "espalier/rollout/reader.h"

#include <gtest/gtest.h>

#include <zlib.h>
#include <zstd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "espalier/rollout/line_reader.h"
#include "espalier/rollout/recorded_experts.h"
#include "tests/support/source_dir.h"
#include "tests/unit/rollout/expect_error.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;

const std::string kGolden = testing::source_dir() + "/tests/golden/";
const std::string kData = testing::source_dir() + "/../shared/data/";

Rollout read_one(const std::string& record) { return parse_rollouts(record, "f").rollouts.at(0); }

// `record` must be refused at line 1 of "f", the field named in `where`, with `words` in the sentence.
void expect_refused(const std::string& record, const std::string& where, const std::string& words,
                    const ReadOptions& options = {}) {
  SCOPED_TRACE(record);
  expect_error<InputError>([&] { parse_rollouts(record, "f", options); }, where, words);
}

std::string with(const std::string& fields) { return R"({"prompt_ids":[1],"response_ids":[2,3],)" + fields + "}"; }

class TemporaryFolder {
 public:
  TemporaryFolder() : path_(fs::temp_directory_path() / ("espalier_reader_" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }
  std::string path() const { return path_; }

 private:
  fs::path path_;
};

std::string gzipped(const std::string& text) {
  std::string out(compressBound(text.size()) + 64, '\0');
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(Reader, ReadsEveryFieldOfTheNeutralFormat) {
  const RolloutFile file = read_rollouts({kGolden + "neutral.jsonl"});
  ASSERT_EQ(file.rollouts.size(), 4u);
  EXPECT_EQ(file.format, "neutral JSON Lines");
  EXPECT_EQ(file.bytes, static_cast<std::int64_t>(fs::file_size(kGolden + "neutral.jsonl")));
  const Rollout &a = file.rollouts[0], &b = file.rollouts[1], &c = file.rollouts[2], &d = file.rollouts[3];

  EXPECT_EQ(a.prompt_ids, (std::vector<std::int32_t>{1, 5, 9}));
  EXPECT_EQ(a.response_ids, (std::vector<std::int32_t>{7, 8, 2}));
  EXPECT_EQ(a.loss_mask, (std::vector<std::uint8_t>{1, 1, 1}));
  EXPECT_EQ(a.old_logprobs, (std::vector<double>{-0.5, -1.25, -0.0625}));
  EXPECT_EQ(a.rollout_logprobs, a.old_logprobs);
  EXPECT_EQ(a.reward, 1.5);
  EXPECT_EQ(a.group, "\"a\"");
  EXPECT_EQ(a.carried, R"({"id":"a-0"})");
  EXPECT_EQ(a.index, 0);
  EXPECT_EQ(a.where, kGolden + "neutral.jsonl:1");
  EXPECT_FALSE(a.step.has_value());
  EXPECT_EQ(a.temperature, 1);

  EXPECT_EQ(b.group, "7");
  EXPECT_TRUE(b.response_ids.empty());
  EXPECT_EQ(b.carried, R"({"id":"b-0","meta":{"text":"caf\u00e9","n":[1,{"deep":null}]}})");

  EXPECT_EQ(c.where, kGolden + "neutral.jsonl:4");  // the blank line counts
  EXPECT_EQ(c.index, 2);
  EXPECT_EQ(c.group, a.group);
  EXPECT_EQ(c.loss_mask, (std::vector<std::uint8_t>{1, 0, 0, 1}));
  EXPECT_EQ(c.advantages, (std::vector<double>{0.5, 0, 0, -1e-3}));
  EXPECT_EQ(c.temperature, 0.7);
  EXPECT_EQ(c.carried, R"({"colour":"blue"})");

  EXPECT_FALSE(d.step.has_value());  // null is as good as absent
  EXPECT_FALSE(d.reward.has_value());
  EXPECT_EQ(d.advantages, std::vector<double>{-0.25});
  EXPECT_EQ(d.values, std::vector<double>{0.5});
  EXPECT_EQ(d.returns, std::vector<double>{0.75});
  EXPECT_EQ(d.ref_logprobs, std::vector<double>{-3});
  EXPECT_EQ(d.old_logprobs.size() + d.rollout_logprobs.size(), 0u);
}

TEST(Reader, AnotherTemperatureIsThatOfRecordsWithoutOne) {
  ReadOptions options;
  options.temperature = 0.5;
  const RolloutFile file = read_rollouts({kGolden + "neutral.jsonl"}, options);
  EXPECT_EQ(file.rollouts[0].temperature, 0.5);
  EXPECT_EQ(file.rollouts[2].temperature, 0.7);
  EXPECT_EQ(read_rollouts({kGolden + "train_data_step3.jsonl"}, options).rollouts[0].temperature, 0.5);
}

TEST(Reader, ReportsAnUnknownFieldOnceWithItsFirstLine) {
  const std::string text = with(R"("advantages":[1,2])") + "\n" + with(R"("advantages":[1,2])") + "\n";
  const RolloutFile file = parse_rollouts(text, "f");
  ASSERT_EQ(file.notes.size(), 1u);
  EXPECT_NE(file.notes[0].find("\"advantages\" is kept and not used (first at f:1)"), std::string::npos)
      << file.notes[0];
  EXPECT_NE(file.notes[0].find("did you mean \"advantage\"?"), std::string::npos);
  const auto note = [](const char* field) {
    return parse_rollouts(with(text_of('"', field, "\":1")), "f").notes.at(0);
  };
  EXPECT_NE(note("rollout_log_probs").find("did you mean \"rollout_logprobs\"?"), std::string::npos);
  EXPECT_NE(note("finish_reasons").find("did you mean \"finish_reason\"?"), std::string::npos);
  EXPECT_EQ(note("uid").find("did you mean"), std::string::npos);  // id is near to anything as short
  EXPECT_TRUE(file.rollouts[1].advantages.empty());
}

TEST(Reader, SpreadsAScalarAdvantageAndKeepsGroupsCanonical) {
  EXPECT_EQ(read_one(with(R"("advantage":2)")).advantages, (std::vector<double>{2, 2}));
  EXPECT_EQ(read_one(with(R"("group":"caf\u00e9\n")")).group, "\"caf\xc3\xa9\\n\"");
  EXPECT_EQ(read_one(with(R"("group":"caf)"
                          "\xc3\xa9"
                          R"(\u000a")"))
                .group,
            "\"caf\xc3\xa9\\n\"");
  EXPECT_EQ(read_one(with(R"("group":123456789012345678901234567890)")).group, "123456789012345678901234567890");
  EXPECT_EQ(read_one(with(R"("group":1.50)")).group, "1.5");
  EXPECT_EQ(read_one(with(R"("group":true)")).group, "true");
  EXPECT_EQ(read_one(with(R"("group":null)")).group, "");
}

TEST(Reader, TakesLineEndsMarksAndBlankLinesAsTheyCome) {
  const std::string record = with("\"reward\":1");
  EXPECT_EQ(parse_rollouts(record, "f").rollouts.size(), 1u);  // no newline at the end
  EXPECT_EQ(parse_rollouts(record + "\r\n" + record + "\r\n", "f").rollouts.size(), 2u);
  EXPECT_EQ(parse_rollouts("\xef\xbb\xbf" + record + "\n", "f").rollouts.size(), 1u);  // byte order mark
  const RolloutFile blanks = parse_rollouts("\n  \n" + record + "\n\t\n" + record + "\n\n", "f");
  ASSERT_EQ(blanks.rollouts.size(), 2u);
  EXPECT_EQ(blanks.rollouts[0].where, "f:3");
  EXPECT_EQ(blanks.rollouts[1].where, "f:5");
  EXPECT_EQ(read_one("  " + record + "  ").reward, 1);
}

TEST(Reader, RefusesBadTokenIdsByElement) {
  const auto prompt = [](const std::string& id) { return R"({"prompt_ids":[1,)" + id + R"(],"response_ids":[2]})"; };
  for (const char* id : {"-1", "1.0", "1e2", "2147483648", "99999999999999999999999", "\"3\"", "null", "true", "[3]",
                         "NaN", "0x1", "01", "+1"})
    expect_refused(prompt(id), "f:1: prompt_ids[1]", "expected a token id, an integer in [0, 2147483648)");
  EXPECT_EQ(read_one(prompt("2147483647")).prompt_ids[1], 2147483647);
  ReadOptions small;
  small.vocabulary = 10;
  expect_refused(prompt("10"), "prompt_ids[1]", "an integer in [0, 10), got 10", small);
  expect_refused(R"({"prompt_ids":[1],"response_ids":[4,11]})", "response_ids[1]", "[0, 10), got 11", small);
  EXPECT_EQ(parse_rollouts(prompt("9"), "f", small).rollouts.size(), 1u);
}

TEST(Reader, RefusesMissingEmptyAndMistypedFields) {
  expect_refused(R"({"response_ids":[1]})", "f:1: prompt_ids", "this field in every record, got none");
  expect_refused(R"({"prompt_ids":[1]})", "f:1: response_ids", "this field in every record");
  expect_refused(R"({"prompt_ids":[],"response_ids":[1]})", "f:1: prompt_ids", "at least one token, got an empty list");
  expect_refused(R"({"prompt_ids":"abc","response_ids":[1]})", "prompt_ids", "a list of token ids, got \"abc\"");
  expect_refused(R"({"prompt_ids":null,"response_ids":[1]})", "prompt_ids", "a list of token ids, got null");
  expect_refused(R"({"prompt_ids":[[1]],"response_ids":[1]})", "prompt_ids[0]", "a token id");
  expect_refused(with(R"("reward":"high")"), "f:1: reward", "a finite number, got \"high\"");
  expect_refused(with(R"("step":1.5)"), "f:1: step", "an integer, got 1.5");
  expect_refused(with(R"("temperature":0)"), "f:1: temperature", "a number above 0, got 0");
  expect_refused(with(R"("temperature":-1)"), "f:1: temperature", "a number above 0");
  expect_refused(with(R"("token_divisor":-1)"), "f:1: token_divisor", "a number of at least 0");
  expect_refused(with(R"("num_items_in_batch":-1)"), "f:1: num_items_in_batch", "a number of at least 0");
  expect_refused(with(R"("group":[1])"), "f:1: group", "a string, a number or true or false, got a list");
  expect_refused(with(R"("loss_mask":[1,2])"), "f:1: loss_mask[1]", "0 or 1, got 2");
  expect_refused(with(R"("loss_mask":[1,"a"])"), "f:1: loss_mask[1]", "0 or 1, got \"a\"");
}

TEST(Reader, RefusesSeriesOfAnotherLength) {
  for (const char* field :
       {"loss_mask", "old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns", "advantage"})
    for (const char* series : {"[]", "[1]", "[1,1,1]"})
      expect_refused(with("\"" + std::string(field) + "\":" + series), std::string("f:1: ") + field,
                     "2 entries, one per response token, got ");
}

TEST(Reader, ReadsRecordedExperts) {
  const Rollout all = read_one(with(R"("routed_experts":[[[5,1],[0,2]],[[3,4],[7,6]],[[0,1],[2,3]]])"));
  EXPECT_EQ(all.recorded_experts.tokens, 3);
  EXPECT_EQ(all.recorded_experts.layers, 2);
  EXPECT_EQ(all.recorded_experts.chosen, 2);
  const auto second = all.experts_at(1);
  EXPECT_EQ(std::vector<std::uint16_t>(second.begin(), second.end()), (std::vector<std::uint16_t>{3, 4, 7, 6}));
  RecordedExperts sorted = all.recorded_experts;
  sort_recorded_experts(sorted);
  EXPECT_EQ(sorted.ids, (std::vector<std::uint16_t>{1, 5, 0, 2, 3, 4, 6, 7, 0, 1, 2, 3}));
  // Engines do not run the last token; null: a token without a record, also before the first one.
  const Rollout some = read_one(with(R"("routed_experts":[null,[[3,4],[7,6]]])"));
  EXPECT_EQ(some.recorded_experts.tokens, 2);
  EXPECT_TRUE(some.experts_at(0).empty());
  EXPECT_EQ(some.experts_at(1).size(), 4u);
  EXPECT_TRUE(some.experts_at(2).empty());
  // Zeros are padding, but not where there is one expert a layer; -1 is padding everywhere.
  for (const char* free : {"[[0,0],[0,0]]", "[[-1,-1],[-1,-1]]", "[[0,0],[-1,-1]]"})
    EXPECT_TRUE(read_one(with(R"("routed_experts":[[[3,4],[7,6]],)" + std::string(free) + "]")).experts_at(1).empty());
  EXPECT_EQ(read_one(with(R"("routed_experts":[[[0]],[[0]]])")).experts_at(1).size(), 1u);
  EXPECT_TRUE(read_one(with(R"("routed_experts":[[[0]],[[-1]]])")).experts_at(1).empty());
  for (const char* none : {"null", "[]", "[null,null]", "[[[0,0]],[[0,0]]]", "[[[-1]],[[-1]]]", "[[[-1]],null]"})
    EXPECT_EQ(read_one(with(std::string(R"("routed_experts":)") + none)).recorded_experts.tokens, 0) << none;
}

TEST(Reader, ALayerMayBeWithoutARecord) {
  constexpr std::uint16_t kFree = RecordedExperts::kFree;
  const std::string value = R"("routed_experts":[[[-1,-1],[7,6]],[[3,4],[-1,-1]],[[0,0],[2,1]]])";
  const Rollout rollout = read_one(with(value));
  const auto at = [&](std::int32_t depth) {
    const auto experts = rollout.experts_at(depth);
    return std::vector<std::uint16_t>(experts.begin(), experts.end());
  };
  EXPECT_EQ(at(0), (std::vector<std::uint16_t>{kFree, kFree, 7, 6}));
  EXPECT_EQ(at(1), (std::vector<std::uint16_t>{3, 4, kFree, kFree}));
  EXPECT_EQ(at(2), (std::vector<std::uint16_t>{0, 0, 2, 1}));  // which layers have experts, a model says
  EXPECT_EQ(R"("routed_experts":)" + recorded_experts_json(rollout.recorded_experts), value);
}

TEST(Reader, RefusesRecordedExpertsOfAnotherShape) {
  const auto refused = [](const std::string& value, const std::string& where, const std::string& words) {
    expect_refused(with(R"("routed_experts":)" + value), "f:1: routed_experts" + where, words);
  };
  refused("[[[1]]]", "", "3 or 2 entries");
  refused("[[[1]],[[1]],[[1]],[[1]]]", "", "3 or 2 entries");
  refused("[[[1],[2]],[[1]]]", "[1]", "2 layers");
  refused("[[[1,2]],[[1]]]", "[1][0]", "2 experts");
  refused("[[[1,2],[3]],[[1,2],[3,4]]]", "[0][1]", "2 experts");
  refused("[[[]],[[]]]", "[0][0]", "at least one expert");
  refused("[[],[]]", "[0]", "at least one layer");
  refused("[[[1]],[[-2]]]", "[1][0]", "integers in [0, 65535), or -1 throughout, got -2");
  refused("[[[1,2]],[[-1,3]]]", "[1][0]", "-1 beside experts");
  refused("[[[1]],[[65535]]]", "[1][0]", "65535");
  refused("[[[1]],[[1.5]]]", "[1][0]", "integers");
  refused("[[1],[1]]", "[0][0]", "a list of experts");
  refused("[1,2]", "[0]", "a list of layers");
  refused("7", "", "a list of tokens");
}

std::vector<std::int32_t> kept_at(const Rollout& rollout, std::size_t position) {
  const auto ids = rollout.kept_sets.at(position);
  return {ids.begin(), ids.end()};
}

TEST(Reader, ReadsKeptSets) {
  using Ids = std::vector<std::int32_t>;
  const Rollout some = read_one(with(R"("kept_ids":[[9,2,4,9],null])"));
  EXPECT_EQ(kept_at(some, 0), (Ids{2, 4, 9})) << "in order, each id once";
  EXPECT_EQ(kept_at(some, 1), Ids()) << "the whole vocabulary";
  for (const char* none : {"null", "[null,null]"})
    EXPECT_TRUE(read_one(with(std::string(R"("kept_ids":)") + none)).kept_sets.empty()) << none;
  // The sets may come before the tokens and the mask. A token without loss may have a set that it is not in.
  const Rollout masked =
      read_one(R"({"kept_ids":[[3],[5,7],[],[4]],"loss_mask":[1,0,0,1],"prompt_ids":[1],"response_ids":[3,6,8,4]})");
  EXPECT_EQ(masked.kept_sets.begin, (std::vector<std::int64_t>{0, 1, 1, 1, 2}));
  EXPECT_EQ(masked.kept_sets.ids, (Ids{3, 4}));
  const RolloutFile pair = parse_rollouts(
      R"({"prompt_ids":[1],"chosen_ids":[2],"rejected_ids":[3,4],"rejected_kept_ids":[[3,5],[4]]})", "f");
  EXPECT_TRUE(pair.rollouts.at(0).kept_sets.empty());
  EXPECT_EQ(kept_at(pair.rollouts.at(1), 0), (Ids{3, 5}));
}

TEST(Reader, RefusesKeptSetsOfOtherTokens) {
  ReadOptions options;
  options.vocabulary = 10;
  const auto refused = [&](const std::string& value, const std::string& where, const std::string& words) {
    expect_refused(with(R"("kept_ids":)" + value), "f:1: kept_ids" + where, words, options);
  };
  refused("[[2,4]]", "", "2 entries, one per response token, got 1");
  refused("[[2],[3],[4]]", "", "2 entries");
  refused("[[2,4],[2,4]]", "[1]", "the sampled token 3 among the kept ids, got 2 ids without it");
  refused("[[],[3]]", "[0]", "the sampled token 2 among the kept ids, got an empty list");
  refused("[[2,10],[3]]", "[0][1]", "an integer in [0, 10)");
  refused("[[2],[3,-1]]", "[1][1]", "a token id");
  refused("[[2],[3,0.5]]", "[1][1]", "a token id");
  refused("[2,3]", "[0]", "a list of token ids");
  refused("[[2],true]", "[1]", "a list of token ids");
  refused("7", "", "a list with the kept ids");
  expect_refused(R"({"prompt_ids":[1],"chosen_ids":[2],"rejected_ids":[3],"chosen_kept_ids":[[3]]})",
                 "f:1: chosen_kept_ids[0]", "the sampled token 2");
  expect_refused(R"({"prompt_ids":[1],"chosen_ids":[2],"rejected_ids":[3],"kept_ids":[[2]]})", "f:1: kept_ids",
                 "no such field together with chosen_ids");
  expect_refused(R"({"prompt_ids":[1],"response_ids":[2],"rejected_kept_ids":[[2]]})", "f:1: rejected_ids",
                 "together with rejected_kept_ids");
}

const char* const kNotFinite[] = {"NaN", "nan", "Infinity", "-Infinity", "1e999", "-1e400", "null"};
const char* const kSeriesNames[] = {"old_logprobs", "ref_logprobs", "values", "returns", "advantage"};

TEST(Reader, RefusesWhatIsNoFiniteNumber) {
  for (const char* bad : {".5", "1.", "--1", "1e", "\"-1\"", "true", "[]"})
    for (const char* name : {"old_logprobs", "rollout_logprobs", "advantage"})
      for (const char* mask : {"", R"(,"loss_mask":[1,0])"})
        expect_refused(with(text_of('"', name, "\":[-1,", bad, "]", mask)), text_of("f:1: ", name, "[1]"),
                       "a finite number, got ");
  for (const char* bad : kNotFinite) {
    for (const char* name : kSeriesNames)
      expect_refused(with(text_of('"', name, "\":[-1,", bad, "]")), text_of("f:1: ", name, "[1]"),
                     "a finite number, because the token has loss");
    if (std::string(bad) != "null")
      for (const char* name : {"reward", "temperature"})
        expect_refused(with(text_of('"', name, "\":", bad)), text_of("f:1: ", name), "a finite number");
  }
  expect_refused(with(R"("advantage":NaN)"), "f:1: advantage[0]", "a finite number");
  expect_refused(with(R"("reward":NaN)"), "reward", "leave out its whole group");
  expect_refused(with(R"("meta":{"x":NaN})"), "f:1: meta", "a JSON value");
  expect_refused(with(R"("meta":{"x":NaN})"), "f:1: meta", "write null there");
  EXPECT_EQ(read_one(with(R"("reward":1e-400)")).reward, 0);  // underflow is a number
}

TEST(Reader, ValuesOfTokensWithoutLossAreZeroWhateverTheyWere) {
  for (const char* bad : kNotFinite)
    for (const char* name : kSeriesNames) {
      const Rollout rollout = read_one(with(text_of(R"("loss_mask":[1,0],)", '"', name, "\":[-1,", bad, "]")));
      for (const auto* series :
           {&rollout.old_logprobs, &rollout.ref_logprobs, &rollout.values, &rollout.returns, &rollout.advantages})
        EXPECT_TRUE(series->empty() || *series == (std::vector<double>{-1, 0})) << name << bad;
    }
  EXPECT_EQ(read_one(with(R"("loss_mask":[0,0],"advantage":NaN)")).advantages, (std::vector<double>{0, 0}));
}

TEST(Reader, ASamplersLogProbMayBeMissingAtATokenWithLoss) {
  for (const char* bad : kNotFinite) {
    const std::string record = with(text_of(R"("loss_mask":[1,0],"rollout_logprobs":[)", bad, ',', bad, "]"));
    const RolloutFile file = parse_rollouts(record + "\n" + record, "f");
    for (const Rollout& rollout : file.rollouts) {
      EXPECT_TRUE(std::isnan(rollout.rollout_logprobs[0]));
      EXPECT_EQ(rollout.rollout_logprobs[1], 0);
      EXPECT_EQ(rollout.sampled_logprob(0, -0.5), -0.5);
    }
    EXPECT_EQ(file.notes, std::vector<std::string>{"rollout_logprobs of 2 tokens with loss are not finite: they count "
                                                   "as not recorded, with importance weight 1"});
  }
  EXPECT_TRUE(parse_rollouts(with(R"("rollout_logprobs":[-1,-2])"), "f").notes.empty());
}

TEST(Reader, RefusesWhatIsNotOneObjectALine) {
  for (const char* text : {"[1,2]", "3", "\"a\"", "null", "{", "}", "{\"prompt_ids\":[1],", "{} {}", "{},", "nonsense",
                           "{\"prompt_ids\":[1],\"response_ids\":[2]}}", "{\"prompt_ids\":[1] \"response_ids\":[2]}",
                           "{prompt_ids:[1]}", "{'prompt_ids':[1]}", "{\"prompt_ids\":[1],}"})
    expect_refused(text, "f:1", "got ");
  expect_refused("{\"prompt_ids\":[1],\"response_ids\":[2]}\n{\"prompt_ids\":[1],\"resp", "f:2", "cut short");
  expect_refused("{\"prompt_ids\":[1],\"response_ids\":[2],\n\"reward\":1}\n", "f:1", "one JSON object on the line");
  expect_refused("{\"prompt_ids\":[1],\"response_ids\":[2],\"id\":\"\xff\"}", "f:1", "not UTF-8");
  expect_refused(with("\"reward\":1,\"reward\":2"), "f:1: reward", "each field once, got this field twice");
  expect_refused(with("\"x\":1,\"x\":2"), "f:1: x", "each field once");
  expect_refused(with("\"reward\":1,\"re\\u0077ard\":2"), "f:1: reward", "each field once");  // the same key, escaped
}

TEST(Reader, RefusesAbsurdNesting) {
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(read_one(with("\"meta\":" + nested(100))).carried, "{\"meta\":" + nested(100) + "}");
  expect_refused(with("\"meta\":" + nested(200)), "f:1: meta", "nested at most 128 deep");
  expect_refused(with("\"meta\":" + nested(1'000'000)), "f:1: meta", "nested at most 128 deep");
  expect_refused(with("\"reward\":" + nested(1'000'000)), "f:1: reward", "a finite number");
  expect_refused(R"({"prompt_ids":)" + nested(1'000'000) + "}", "prompt_ids[0]", "a token id");
}

TEST(Reader, RefusesEmptyFilesFoldersAndWhatCannotBeOpened) {
  const TemporaryFolder folder;
  expect_error<InputError>([&] { read_rollouts({folder.file("empty.jsonl", "")}); }, "empty.jsonl", "an empty file");
  expect_error<InputError>([&] { read_rollouts({folder.file("blank.jsonl", " \n\n")}); }, "blank.jsonl",
                           "blank lines only");
  fs::create_directory(folder.path() + "/folder");
  expect_error<InputError>([&] { read_rollouts({folder.path() + "/folder"}); }, "/folder", "a directory without any");
  expect_error<InputError>([&] { read_rollouts({folder.path() + "/none.jsonl"}); }, "none.jsonl", "No such file");
  const std::string locked = folder.file("locked.jsonl", with("\"reward\":1"));
  fs::permissions(locked, fs::perms::none);
  if (::geteuid() != 0) expect_error<InputError>([&] { read_rollouts({locked}); }, "locked.jsonl", "Permission denied");
  EXPECT_THROW(read_rollouts({}), OptionError);
}

TEST(Reader, RefusesTextDumpsByTheNameOfTheirWriter) {
  const auto refuse = [](const std::string& record, const std::string& words) {
    expect_error<UnsupportedError>([&] { parse_rollouts(record, "f"); }, "f:1", words);
  };
  refuse(R"({"input":"q","output":"a","score":1,"step":3})", "verl's rollout dump");
  refuse(R"({"step":1,"prompt":"q","completion":"a"})", "TRL");
  refuse(R"({"messages":[{"role":"user","content":"hi"}]})", "chat messages");
  refuse(R"({"prompt":["q"],"responses":["a"]})", "ROLL");
  refuse(R"({"content":["q"],"input_lengths":[3],"generation_logprobs":[[0,1,2]]})",
         "NeMo-RL version that does not log token_ids");
  refuse(R"({"input":"q","output":"a"})", "Record token ids");
}

TEST(Reader, RefusesTypesThatAreNeverRead) {
  const TemporaryFolder folder;
  for (const char* name : {"a.npz", "a.Arrow"})
    expect_error<UnsupportedError>([&] { read_rollouts({folder.file(name, "x")}); }, name, "Write neutral JSON Lines");
  // Files that Python reads must have a path.
  expect_error<UnsupportedError>([&] { parse_rollouts("PK\x03\x04 zip", "f"); }, "f", "a torch file");
  expect_error<UnsupportedError>([&] { parse_rollouts("PAR1", "f"); }, "f", "a Parquet file");
  expect_error<UnsupportedError>([&] { parse_rollouts("\x80\x04\x95 pickle", "f"); }, "f", "a pickle file");
}

TEST(Reader, NamesTablesAndArrays) {
  const auto refuse = [](const std::string& text, const std::string& name, const std::string& words) {
    SCOPED_TRACE(text);
    expect_error<UnsupportedError>([&] { parse_rollouts(text, name); }, name, words);
  };
  refuse("prompt,completion,reward\nq,a,1\n", "f", "a CSV table");
  refuse("prompt\tcompletion\n", "f", "a CSV table");
  refuse("reward\n1\n", "table.CSV", "a CSV table");
  refuse("[\n  {\"prompt_ids\": [1]}\n]\n", "f", "jq -c '.[]'");
  refuse("[{\"prompt_ids\": [1], \"response_ids\": [2]}]\n", "f", "a JSON array of records");
  refuse("\u250f\u2501\u2501 Step 10 \u2501\u2501\u2513\n", "f", "TRL prints its completions so");
  refuse("\u256d\u2500\u2500 Step 10 \u2500\u2500\u256e\n", "f", "a printed table");
}

TEST(Reader, RandomBytesAreBinaryDataAndNoTable) {
  std::mt19937 draw(20261123);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(draw());
    bytes[0] = '\x01';  // no other format begins so
    expect_error<UnsupportedError>([&] { parse_rollouts(bytes, "f.jsonl"); }, "f.jsonl", "binary data");
  }
}

TEST(Reader, ARecordWithoutAResponseIsCalledAPrompt) {
  for (const char* text : {R"({"prompt_ids":[1,2]})", R"({"prompt":"What is 2 + 3?","ground_truth":"5"})",
                           R"({"prompt":[{"role":"user","content":"Hi"}]})"})
    expect_error<InputError>([&] { parse_rollouts(text, "f"); }, "f:1", "generate --prompts");
}

TEST(Reader, KnowsWhatScoreWrites) {
  const RolloutFile file = parse_rollouts(with(R"("logprobs":[-1,-2],"entropies":[0.5,0.25])"), "f");
  EXPECT_TRUE(file.notes.empty()) << file.notes[0];
  EXPECT_EQ(file.rollouts[0].carried, R"({"logprobs":[-1,-2],"entropies":[0.5,0.25]})");
}

std::string packed_by_zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

TEST(Reader, UnpacksZstdByContentAndKnowsWhenItIsCut) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += with("\"reward\":" + std::to_string(i)) + "\n";
  const std::string packed = packed_by_zstd(text);
  ASSERT_EQ(parse_rollouts(packed, "f").rollouts.size(), 20'000u);
  const RolloutFile two_frames = parse_rollouts(packed + packed, "f");
  ASSERT_EQ(two_frames.rollouts.size(), 40'000u);
  EXPECT_EQ(two_frames.rollouts.back().reward, 19'999);
  EXPECT_EQ(two_frames.bytes, static_cast<std::int64_t>(2 * packed.size()));
  for (const std::size_t kept : {packed.size() - 1, packed.size() / 2, std::size_t{5}})
    expect_error<InputError>([&] { parse_rollouts(packed.substr(0, kept), "f"); }, "f", "complete zstd file");
  expect_error<InputError>([&] { parse_rollouts(packed + "more", "f"); }, "f", "complete zstd file");
}

TEST(Reader, UnpacksGzipByContentAndKnowsWhenItIsCut) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += with("\"reward\":" + std::to_string(i)) + "\n";
  const std::string packed = gzipped(text);
  ASSERT_EQ(parse_rollouts(packed, "f").rollouts.size(), 200u);
  const RolloutFile two_members = parse_rollouts(packed + packed, "f");
  ASSERT_EQ(two_members.rollouts.size(), 400u);
  EXPECT_EQ(two_members.rollouts[399].reward, 199);
  EXPECT_EQ(two_members.bytes, static_cast<std::int64_t>(2 * packed.size()));
  for (std::size_t bytes = 2; bytes < packed.size(); ++bytes)
    expect_error<InputError>([&] { parse_rollouts(packed.substr(0, bytes), "f"); }, "f", "");
  expect_error<InputError>([&] { parse_rollouts(packed + "rest", "f"); }, "f", "a complete gzip file");
}

TEST(Reader, ReadsSeveralFilesAsOneAndTellsItsProgress) {
  const TemporaryFolder folder;
  const std::string a = folder.file("a.jsonl", with("\"reward\":1") + "\n");
  const std::string b = folder.file("b.jsonl.gz", gzipped(with("\"reward\":2") + "\n"));
  std::int64_t last = 0, total = 0;
  ReadOptions options;
  options.progress = [&](std::int64_t done, std::int64_t of) {
    EXPECT_GE(done, last);
    last = done;
    total = of;
  };
  const RolloutFile file = read_rollouts({a, b}, options);
  ASSERT_EQ(file.rollouts.size(), 2u);
  EXPECT_EQ(file.rollouts[1].index, 1);
  EXPECT_EQ(file.rollouts[1].where, b + ":1");
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, file.bytes);
  expect_error<InputError>([&] { read_rollouts({a, folder.path() + "/c.jsonl"}); }, "c.jsonl", "No such file");
}

TEST(LineReader, GivesTheSameLinesForEveryBlockSize) {
  const std::string text =
      "\xef\xbb\xbf"
      "a\n\nbb\r\n" +
      std::string(300, 'x') + "\n \nlast";
  for (std::size_t block = 1; block < 40; ++block) {
    const auto stream = memory_bytes(text);
    LineReader lines(*stream, "f", nullptr, block);
    std::vector<std::pair<std::string, std::int64_t>> got;
    bool ends = false;
    for (Line line; lines.next(line);) {
      EXPECT_FALSE(ends);
      got.emplace_back(line.text, line.number);
      ends = line.ends_file;
    }
    EXPECT_TRUE(ends);
    EXPECT_EQ(got, (std::vector<std::pair<std::string, std::int64_t>>{
                       {"a", 1}, {"bb\r", 3}, {std::string(300, 'x'), 4}, {"last", 6}}))
        << "block of " << block;
  }
}

TEST(Reader, ReadsTheSampledStories) {
  const std::string path = kData + "stories260K/rollouts.jsonl";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is absent";
  ReadOptions options;
  options.vocabulary = 512;
  const RolloutFile file = read_rollouts({path}, options);
  ASSERT_EQ(file.rollouts.size(), 64u);
  EXPECT_TRUE(file.notes.empty());
  for (const Rollout& rollout : file.rollouts) {
    EXPECT_LE(rollout.response_length(), 96);
    EXPECT_EQ(rollout.old_logprobs.size(), rollout.response_ids.size());
    EXPECT_EQ(rollout.rollout_logprobs.size(), rollout.response_ids.size());
    EXPECT_TRUE(rollout.reward.has_value());
  }
  options.vocabulary = 400;
  EXPECT_THROW(read_rollouts({path}, options), InputError);
}

TEST(Reader, ReadsTheRecordedTrace) {
  const std::string path = kData + "trace_grpo20/rollouts.jsonl.gz";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is absent";
  const RolloutFile file = read_rollouts({path});
  ASSERT_EQ(file.rollouts.size(), 640u);
  std::int64_t masked = 0;
  for (const Rollout& rollout : file.rollouts) {
    ASSERT_TRUE(rollout.step.has_value());
    EXPECT_GE(*rollout.step, 1);
    EXPECT_LE(*rollout.step, 20);
    masked += !rollout.loss_mask.empty() && rollout.loss_mask[0] == 0;
  }
  EXPECT_GT(masked, 0);
}

}  // namespace
}  // namespace espalier
