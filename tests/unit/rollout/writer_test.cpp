#include "espalier/rollout/writer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "espalier/base/json.h"
#include "espalier/base/random.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/rollout/reader.h"
#include "espalier/rollout/record_data.h"
#include "tests/support/make_rollouts.h"
#include "tests/unit/rollout/expect_error.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class Writer : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier_writer_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ / name; }
  std::string text_of_file(const std::string& name) const {
    std::ifstream in(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::size_t files_in_folder() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  fs::path folder_;
};

void expect_same(const Rollout& a, const Rollout& b) {
  EXPECT_EQ(a.prompt_ids, b.prompt_ids);
  EXPECT_EQ(a.response_ids, b.response_ids);
  EXPECT_EQ(a.loss_mask, b.loss_mask);
  EXPECT_EQ(a.advantages, b.advantages);
  EXPECT_EQ(a.reward, b.reward);
  for (const SeriesRow& row : series_rows()) EXPECT_EQ(a.*row.values, b.*row.values) << row.name;
  for (const ScalarRow& row : scalar_rows())
    std::visit([&](auto member) { EXPECT_EQ(a.*member, b.*member) << row.name; }, row.value);
  EXPECT_EQ(a.temperature, b.temperature);
  EXPECT_EQ(a.carried, b.carried);
  EXPECT_EQ(a.index, b.index);
  EXPECT_EQ(a.kept_sets.begin, b.kept_sets.begin);
  EXPECT_EQ(a.kept_sets.ids, b.kept_sets.ids);
  EXPECT_EQ(a.recorded_experts.tokens, b.recorded_experts.tokens);
  EXPECT_EQ(a.recorded_experts.layers, b.recorded_experts.layers);
  EXPECT_EQ(a.recorded_experts.chosen, b.recorded_experts.chosen);
  EXPECT_EQ(a.recorded_experts.ids, b.recorded_experts.ids);
}

TEST_F(Writer, WhatIsReadBackHasTheSameBits) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::vector<Rollout> rollouts = testing::make_rollouts(testing::any_options(seed), seed);
    rollouts[0].carried = R"({"id":12345678901234567890123,"meta":{"x": [1, 2.50]},"colour":"b\u006cue"})";
    rollouts.back().token_divisor = 1.0 / 7;
    rollouts.back().num_items_in_batch = 91;
    constexpr std::uint16_t kFree = RecordedExperts::kFree;
    if (rollouts[0].length() == 3)
      rollouts[0].recorded_experts = {3, 2, 2, {0, 5, 1, 2, kFree, kFree, kFree, kFree, 3, 4, 6, 7}};
    if (rollouts[0].length() == 4) rollouts[0].recorded_experts = {3, 1, 1, {kFree, 65534, 0}};
    rollouts[0].kept_sets = {};
    for (const std::int32_t id : rollouts[0].response_ids)  // some tokens have no set
      add_kept_set(rollouts[0].kept_sets, std::vector<std::int32_t>(id % 3, id));
    if (rollouts[0].kept_sets.ids.empty()) rollouts[0].kept_sets = {};
    rollouts[0].full_logprobs = rollouts[0].rollout_logprobs;
    const std::string file = path(seed % 2 ? "a.jsonl" : "a.jsonl.gz");
    testing::write_jsonl(file, rollouts);
    const RolloutFile back = read_rollouts({file});
    ASSERT_EQ(back.rollouts.size(), rollouts.size());
    for (std::size_t i = 0; i < rollouts.size(); ++i) expect_same(rollouts[i], back.rollouts[i]);
  }
}

TEST_F(Writer, EveryRowOfTheTableOfDataSurvivesReadingAndWriting) {
  std::string fields = R"("group":"g","step":3,"trajectory":true,"turn":1,"branch":"b","loss_unit":"trajectory")";
  std::string series;
  for (const ScalarRow& row : scalar_rows())
    if (row.is_amount()) series += text_of(",\"", row.name, "\":0.25");
  for (const SeriesRow& row : series_rows()) series += text_of(",\"", row.name, "\":[-0.5,-0.125]");
  const std::string record = text_of("{", fields, R"(,"prompt_ids":[1],"response_ids":[2,3])", series, "}");
  const Rollout rollout = parse_rollouts(record, "f").rollouts.at(0);
  for (const ScalarRow& row : scalar_rows()) EXPECT_TRUE(row.given(rollout)) << row.name << ": give it here, too";
  EXPECT_EQ(rollout_json(rollout), record);
}

// At a token without loss it is 0, at one with loss an error, but a missing log-prob of the sampler.
TEST_F(Writer, EveryRowOfASeriesTakesTheRuleForNumbersThatAreNotFinite) {
  for (const SeriesRow& row : series_rows()) {
    const auto record = [&](const char* values) {
      return text_of(R"({"prompt_ids":[1],"response_ids":[2,3],"loss_mask":[1,0],")", row.name, "\":", values, "}");
    };
    EXPECT_EQ(parse_rollouts(record("[-1,null]"), "f").rollouts[0].*row.values, (std::vector<double>{-1, 0}))
        << row.name;
    if (row.kind == SeriesKind::sampled)
      EXPECT_TRUE(std::isnan((parse_rollouts(record("[null,0]"), "f").rollouts[0].*row.values)[0])) << row.name;
    else
      testing::expect_error<InputError>([&] { parse_rollouts(record("[null,0]"), "f"); }, std::string(row.name),
                                        "loss");
    testing::expect_error<InputError>([&] { parse_rollouts(record("[1]"), "f"); }, std::string(row.name), "2 entries");
  }
}

TEST_F(Writer, NumbersAreShortAndExact) {
  std::string text;
  Rollout rollout;
  rollout.prompt_ids = {1};
  rollout.response_ids = {2, 3, 4, 5};
  rollout.loss_mask = {1, 1, 1, 1};
  rollout.old_logprobs = {-0.1, std::numeric_limits<double>::denorm_min(), -std::numeric_limits<double>::max(), -0.0};
  EXPECT_EQ(rollout_json(rollout),
            R"({"prompt_ids":[1],"response_ids":[2,3,4,5],"old_logprobs":[-0.1,5e-324,-1.7976931348623157e+308,-0]})");
  const Rollout back = parse_rollouts(rollout_json(rollout), "f").rollouts.at(0);
  EXPECT_EQ(back.old_logprobs, rollout.old_logprobs);
  EXPECT_TRUE(std::signbit(back.old_logprobs[3]));
}

TEST_F(Writer, ALogProbThatWasNotRecordedIsNull) {
  const std::string record = R"({"prompt_ids":[1],"response_ids":[2,3],"rollout_logprobs":[null,-0.5]})";
  EXPECT_EQ(rollout_json(parse_rollouts(record, "f").rollouts[0], {}), record);
}

TEST_F(Writer, ExtraSeriesAreAddedOrStandInPlace) {
  Rollout rollout =
      parse_rollouts(R"({"id":1,"logprobs":[9,9],"prompt_ids":[1],"response_ids":[2,3],"old_logprobs":[-1,-2]})", "f")
          .rollouts.at(0);
  const std::vector<double> fresh = {-0.5, -0.25};
  const Json scored = Json::parse(rollout_json(rollout, {{"logprobs", fresh}, {"entropies", fresh}}));
  EXPECT_EQ(scored["logprobs"].get<std::vector<double>>(), fresh);
  EXPECT_EQ(scored["entropies"].get<std::vector<double>>(), fresh);
  EXPECT_EQ(scored["old_logprobs"].get<std::vector<double>>(), (std::vector<double>{-1, -2}));
  EXPECT_EQ(scored["id"], 1);
  const Json replaced = Json::parse(rollout_json(rollout, {{"old_logprobs", fresh}}));
  EXPECT_EQ(replaced["old_logprobs"].get<std::vector<double>>(), fresh);
  EXPECT_EQ(replaced["logprobs"].get<std::vector<double>>(), (std::vector<double>{9, 9}));
  const std::vector<double> too_short = {1};
  EXPECT_THROW(rollout_json(rollout, {{"logprobs", too_short}}), InternalError);
}

TEST_F(Writer, AnswersOfAPairKeepTheirSets) {
  const std::string text =
      R"({"prompt_ids":[1],"chosen_ids":[2,7],"chosen_kept_ids":[[2,4],null],"rejected_ids":[3],"rejected_kept_ids":[[3]]})";
  EXPECT_EQ(set_json(parse_rollouts(text, "f").rollouts), text);
}

TEST_F(Writer, WritesTheSameGzipBytesTwice) {
  const std::vector<Rollout> rollouts = testing::make_rollouts({}, 3);
  testing::write_jsonl(path("a.jsonl.gz"), rollouts);
  testing::write_jsonl(path("b.jsonl.gz"), rollouts);
  EXPECT_EQ(text_of_file("a.jsonl.gz"), text_of_file("b.jsonl.gz"));
}

TEST_F(Writer, LeavesWhatWasThereUntilItIsFinished) {
  std::ofstream(path("out.jsonl")) << "earlier";
  {
    RolloutWriter writer(path("out.jsonl"));
    for (const Rollout& rollout : testing::make_rollouts({}, 1)) writer.write(rollout);
    EXPECT_EQ(text_of_file("out.jsonl"), "earlier");
  }
  EXPECT_EQ(text_of_file("out.jsonl"), "earlier");
  EXPECT_EQ(files_in_folder(), 1u);
  testing::write_jsonl(path("out.jsonl"), testing::make_rollouts({}, 1));
  EXPECT_GT(read_rollouts({path("out.jsonl")}).rollouts.size(), 0u);
  EXPECT_EQ(files_in_folder(), 1u);
}

TEST_F(Writer, SaysWhereItCannotWrite) {
  testing::expect_error<OptionError>([&] { RolloutWriter writer(path("none/out.jsonl")); }, "none", "");
}

}  // namespace
}  // namespace espalier
