// Texts of a plan, for people and for programs.
#include <gtest/gtest.h>

#include "espalier/base/json.h"
#include "espalier/plan/planner.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

TEST(Explain, NamesTreesCostsAndTheMachine) {
  std::vector<Rollout> batch;
  for (std::int32_t g = 0; g < 20; ++g)
    for (const Rollout& rollout : group_of(2000, 400 + g / 2, 8, 100000 * g)) batch.push_back(rollout);
  PlanOptions options;
  options.token_budget = 1024;
  const std::string text = explain(planned(batch, options));
  for (const char* part : {"160 rollouts in 20 prefix trees", "phased", "19,200", "0-1 ", "Budget of 1,024 rows",
                           "Ceiling", "dense", "packed", "chosen", "Machine: a CPU", "as asked for", "GFLOP/s", "[BB"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  // Ten kinds of trees, two of each: ten lines. Twenty kinds: twelve and a remark.
  EXPECT_EQ(text.find("more\n"), std::string::npos);
  for (std::size_t i = 0; i < batch.size(); ++i)
    if (i % 16 == 0) batch[i].response_ids.resize(300), batch[i].loss_mask.resize(300);
  EXPECT_NE(explain(planned(batch, options)).find("... and 8 more"), std::string::npos);
  for (char c : text) ASSERT_TRUE(c == '\n' || (c >= 32 && c < 127));
}

TEST(Explain, JsonHasTheFieldsOfTheContract) {
  const Json json = to_json(planned(group_of(100, 20, 6), {}));
  const Json& tree = json.at("trees").at(0);
  EXPECT_EQ(tree.at("rows").at("logical"), 720);
  EXPECT_EQ(tree.at("rows").at("physical"), 220);
  for (const char* name : {"schedule", "reason"}) EXPECT_TRUE(tree.at(name).is_string());
  for (const char* name : {"trunks", "waves"}) EXPECT_TRUE(tree.at(name).is_number_integer());
  for (const char* name : {"dense", "packed", "phased", "chosen"}) {
    EXPECT_GT(json.at("flops").at(name).get<double>(), 0);
    const Json& predicted = json.at("predicted").at(name);
    EXPECT_GT(predicted.at("seconds").get<double>(), 0);
    for (const char* phase : {"A", "B", "C"}) EXPECT_TRUE(predicted.at("peak_bytes").at(phase).is_number_integer());
  }
  EXPECT_GT(json.at("ceiling").get<double>(), 1);
}

}  // namespace
}  // namespace espalier
