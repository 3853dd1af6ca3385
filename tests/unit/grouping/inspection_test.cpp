#include "espalier/grouping/inspection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "espalier/base/json.h"
#include "espalier/rollout/reader.h"
#include "tests/support/source_dir.h"

namespace espalier {
namespace {

const std::string kData = testing::source_dir() + "/../shared/data/";

Inspection inspected(const std::string& text) { return inspect_rollouts(parse_rollouts(text, "f").rollouts); }

std::map<std::string, std::vector<std::int64_t>> lines_by_kind(const Inspection& inspection) {
  std::map<std::string, std::vector<std::int64_t>> out;
  for (const Anomaly& anomaly : inspection.anomalies) out[anomaly.kind].push_back(anomaly.line);
  return out;
}

TEST(Inspection, SaysWhatEachTurnAdds) {
  const Inspection inspection =
      inspected(R"({"trajectory":"x","turn":0,"prompt_ids":[1,2],"response_ids":[5],"reward":1}
{"trajectory":"x","turn":1,"prompt_ids":[1,2,5,8],"response_ids":[6],"reward":1}
{"trajectory":"y","turn":0,"prompt_ids":[1,2],"response_ids":[7],"reward":0}
{"trajectory":"y","turn":1,"prompt_ids":[1,2,9],"response_ids":[6],"reward":0}
)");
  EXPECT_EQ(inspection.trajectories, 2);
  EXPECT_EQ(inspection.groups, 1);
  EXPECT_EQ(inspection.turns.max, 2);
  ASSERT_EQ(inspection.by_turn.size(), 2u);
  EXPECT_EQ(inspection.by_turn[0].rollouts, 2);
  EXPECT_EQ(inspection.by_turn[0].logical_tokens, 6);
  EXPECT_EQ(inspection.by_turn[0].physical_tokens, 4);  // 1 2, 5, 7
  EXPECT_EQ(inspection.by_turn[1].logical_tokens, 5 + 4);
  EXPECT_EQ(inspection.by_turn[1].physical_tokens, 2 + 2);  // 8 6; 9 6 behind an edited history
  EXPECT_TRUE(inspection.anomalies.empty());
  EXPECT_EQ(inspection_json(inspection)["by_turn"][1]["physical"], 4);
}

TEST(Inspection, CountsAGroupByHand) {
  const Inspection inspection = inspected(R"({"group":1,"prompt_ids":[1,2,3,4],"response_ids":[5,6],"reward":1}
{"group":1,"prompt_ids":[1,2,3,4],"response_ids":[5,7],"reward":0}
{"group":1,"prompt_ids":[1,2,3,4],"response_ids":[8],"reward":0,"loss_mask":[1]}
{"group":2,"prompt_ids":[9],"response_ids":[5],"reward":1}
{"group":2,"prompt_ids":[9],"response_ids":[6],"reward":0}
)");
  EXPECT_EQ(inspection.rollouts, 5);
  EXPECT_EQ(inspection.groups, 2);
  EXPECT_EQ(inspection.steps, 0);
  EXPECT_EQ(inspection.logical_tokens, 17 + 4);
  EXPECT_EQ(inspection.physical_tokens, 8 + 3);  // 1234, 5, 6, 7, 8 and 9, 5, 6
  EXPECT_EQ(inspection.loss_tokens, 7);
  EXPECT_DOUBLE_EQ(inspection.saved_share(), 1 - 11.0 / 21);
  EXPECT_DOUBLE_EQ(inspection.prefix_share.min, 1 - 3.0 / 4);
  EXPECT_DOUBLE_EQ(inspection.prefix_share.max, 1 - 8.0 / 17);
  EXPECT_DOUBLE_EQ(inspection.prefix_share.p50, (0.25 + 9.0 / 17) / 2);
  EXPECT_EQ(inspection.group_size.min, 2);
  EXPECT_EQ(inspection.group_size.p50, 2.5);
  EXPECT_EQ(inspection.group_size.max, 3);
  EXPECT_EQ(inspection.prompt_length.p50, 4);
  EXPECT_EQ(inspection.response_length.p50, 1);
  EXPECT_TRUE(inspection.anomalies.empty());
  EXPECT_EQ(inspection.series, std::vector<std::string>{"reward"});
}

TEST(Inspection, FindsEveryAnomaly) {
  const Inspection inspection = inspected(R"({"group":1,"prompt_ids":[1,2],"response_ids":[5],"reward":1}
{"group":1,"prompt_ids":[1,3],"response_ids":[5],"reward":0}
{"group":1,"prompt_ids":[1,2],"response_ids":[],"reward":0}
{"group":1,"prompt_ids":[1,2],"response_ids":[5],"reward":0}
{"group":2,"prompt_ids":[1,2],"response_ids":[6],"loss_mask":[0],"reward":0.5}
{"group":2,"prompt_ids":[1,2],"response_ids":[7],"reward":0.5,"step":3}
{"group":3,"prompt_ids":[1,2],"response_ids":[8]}
)");
  const std::map<std::string, std::vector<std::int64_t>> expected = {
      {"prompt_differs", {2}}, {"empty_response", {3}}, {"duplicate_response", {4}}, {"fully_masked", {5}},
      {"equal_rewards", {5}},  {"group_of_one", {7}},   {"nothing_to_learn", {7}},   {"partial_steps", {7}},
  };
  EXPECT_EQ(lines_by_kind(inspection), expected);
  const auto text = [&](const std::string& kind) {
    return std::find_if(inspection.anomalies.begin(), inspection.anomalies.end(),
                        [&](const Anomaly& anomaly) { return anomaly.kind == kind; })
        ->text;
  };
  EXPECT_EQ(text("prompt_differs"), "its prompt differs from that of f:1 (same group) at token 1 of 2");
  EXPECT_EQ(text("duplicate_response"), "same tokens as f:1");
  EXPECT_EQ(text("equal_rewards"), "all 2 rewards of its group are 0.5");
}

TEST(Inspection, NamesLogProbsAboveZeroButNotTheirRounding) {
  const Inspection inspection =
      inspected(R"({"group":1,"prompt_ids":[1],"response_ids":[5,6],"reward":1,"old_logprobs":[-1,0.5]}
{"group":1,"prompt_ids":[1],"response_ids":[5],"reward":0,"rollout_logprobs":[1e-6],"ref_logprobs":[2]}
)");
  EXPECT_EQ(lines_by_kind(inspection),
            (std::map<std::string, std::vector<std::int64_t>>{{"positive_logprob", {1, 2}}}));
  EXPECT_EQ(inspection.anomalies[0].text, "old_logprobs[1] is 0.5, but the logarithm of a probability is at most 0");
  EXPECT_EQ(inspection.anomalies[1].text.find("ref_logprobs[0] is 2"), 0u);
}

TEST(Inspection, SaysWhenNoGroupHasUnequalRewards) {
  const std::string equal = R"({"group":1,"prompt_ids":[1],"response_ids":[5],"reward":1}
{"group":1,"prompt_ids":[1],"response_ids":[6],"reward":1}
{"group":2,"prompt_ids":[2],"response_ids":[5],"reward":0}
{"group":2,"prompt_ids":[2],"response_ids":[6],"reward":0}
)";
  EXPECT_EQ(lines_by_kind(inspected(equal)).at("no_signal"), std::vector<std::int64_t>{1});
  const std::string unequal = R"({"group":3,"prompt_ids":[3],"response_ids":[5],"reward":0}
{"group":3,"prompt_ids":[3],"response_ids":[6],"reward":1}
)";
  EXPECT_FALSE(lines_by_kind(inspected(equal + unequal)).contains("no_signal"));
  EXPECT_FALSE(lines_by_kind(inspected(R"({"prompt_ids":[3],"response_ids":[5],"reward":0})")).contains("no_signal"));
}

TEST(Inspection, SharesNothingBetweenSteps) {
  const Inspection inspection = inspected(R"({"step":1,"prompt_ids":[1,2],"response_ids":[3]}
{"step":2,"prompt_ids":[1,2],"response_ids":[3]}
)");
  EXPECT_EQ(inspection.steps, 2);
  EXPECT_EQ(inspection.groups, 2);
  EXPECT_EQ(inspection.physical_tokens, 6);
}

TEST(Inspection, HasTheContractsNamesInJson) {
  const Json json = inspection_json(inspected(R"({"prompt_ids":[1,2],"response_ids":[3]})"));
  EXPECT_EQ(json["rollouts"], 1);
  EXPECT_EQ(json["groups"], 1);
  EXPECT_EQ(json["tokens"]["logical"], 3);
  EXPECT_EQ(json["tokens"]["physical"], 3);
  EXPECT_EQ(json["prefix_share"]["p50"], 0);
  EXPECT_TRUE(json["prefix_share"].contains("p95"));
  for (const char* field : {"min", "p50", "max"}) EXPECT_EQ(json["n"][field], 1);
  ASSERT_EQ(json["anomalies"].size(), 2u);
  EXPECT_EQ(json["anomalies"][0]["line"], 1);
  EXPECT_EQ(json["anomalies"][0]["kind"], "nothing_to_learn");
  EXPECT_TRUE(json["anomalies"][0]["text"].is_string());
}

TEST(Inspection, TextIsAlignedAndComplete) {
  const std::string text = inspection_text(inspected(R"({"group":1,"prompt_ids":[1,2],"response_ids":[5],"reward":1}
{"group":1,"prompt_ids":[1,2],"response_ids":[],"reward":0}
)"));
  EXPECT_EQ(text,
            "rollouts          2 in 1 group\n"
            "fields            reward\n"
            "\n"
            "                             min        median           p95           max\n"
            "rollouts a group               2             2             2             2\n"
            "prompt tokens                  2             2             2             2\n"
            "response tokens                0           0.5           0.9             1\n"
            "shared in a group         40.0 %        40.0 %        40.0 %        40.0 %\n"
            "\n"
            "                         logical      physical         saved     with loss\n"
            "tokens                         5             3        40.0 %             1\n"
            "\n"
            "anomalies         1\n"
            "       1  empty response\n"
            "          at f:2: the response has no token\n");
}

TEST(Inspection, KnowsTheSampledStories) {
  const std::string path = kData + "stories260K/rollouts.jsonl";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is absent";
  const Inspection inspection = inspect_rollouts(read_rollouts({path}).rollouts);
  EXPECT_EQ(inspection.groups, 8);
  EXPECT_EQ(inspection.group_size.p50, 8);
  EXPECT_EQ(inspection.prompt_length.max, 300);
  EXPECT_LT(inspection.physical_tokens, inspection.logical_tokens / 2);
  RecordProperty("text", inspection_text(inspection));
}

}  // namespace
}  // namespace espalier
