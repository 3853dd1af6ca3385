// Inputs of losses by their names, and what is wrong with them.
#include "espalier/serve/losses.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

const BaseModel kModel{"tiny", "/models/tiny", "identity of tiny", "Tiny", 10, 6};

Tensor integers(std::vector<std::int64_t> shape, std::vector<std::int64_t> values) {
  return {std::move(shape), true, std::move(values), {}};
}
Tensor floats(std::vector<std::int64_t> shape, std::vector<float> values) {
  return {std::move(shape), false, {}, std::move(values)};
}

NamedDatum datum(std::map<std::string, Tensor> inputs) { return {{1, 2, 3}, std::move(inputs)}; }

NamedDatum ratio_datum() {
  return datum({{"target_tokens", integers({3}, {2, 3, 4})},
                {"logprobs", floats({3}, {-1, -2, -3})},
                {"advantages", floats({3}, {1, 0, -1})}});
}

std::string error_of(const std::string& loss, NamedDatum one, const LossConfig& config = {}) {
  try {
    std::vector<NamedDatum> data{ratio_datum()};
    if (loss == "cross_entropy") data = {datum({{"target_tokens", integers({3}, {2, 3, 4})}})};
    data.push_back(std::move(one));
    training_call(loss, config, true, std::move(data), kModel);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Losses, InputsTakeTheirPlaces) {
  NamedDatum one = ratio_datum();
  one.inputs["clip_low_threshold"] = floats({3}, {0.1f, 0.2f, 0.3f});
  const TrainingCall call = training_call("cispo", {{"clip_high_threshold", 3.0}}, false, {one}, kModel);
  EXPECT_EQ(call.loss, LossName::cispo);
  EXPECT_FALSE(call.backward);
  EXPECT_EQ(call.low, 0.8);
  EXPECT_EQ(call.high, 3.0);
  const TrainingDatum& out = call.data.front();
  EXPECT_EQ(out.tokens, (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(out.targets, (std::vector<std::int32_t>{2, 3, 4}));
  EXPECT_EQ(out.weight, (std::vector<float>{1, 0, -1}));
  EXPECT_EQ(out.old_logprob, (std::vector<float>{-1, -2, -3}));
  EXPECT_EQ(out.low, (std::vector<float>{0.1f, 0.2f, 0.3f}));
  EXPECT_TRUE(out.high.empty());
}

TEST(Losses, WeightsDefaultToOne) {
  const TrainingCall call = training_call("cross_entropy", {}, true,
                                          {datum({{"target_tokens", integers({3, 2}, {1, 2, 3, 4, 5, 6})}})}, kModel);
  EXPECT_EQ(call.data[0].weight, std::vector<float>(6, 1));
  EXPECT_EQ(call.data[0].columns, 2);
  EXPECT_TRUE(call.data[0].is_wide);
}

TEST(Losses, MistakesAreNamed) {
  const auto expect = [](const std::string& got, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(got.find(word), got.npos) << word << " in " << got;
  };
  expect(error_of("nobody", ratio_datum()), {"loss_fn", "cross_entropy", "nobody"});
  expect(error_of("stable_reinforce", ratio_datum()), {"not published", "importance_sampling"});
  expect(error_of("ppo", datum({{"target_tokens", integers({3}, {1, 2, 3})}})), {"datum 1", "logprobs", "ppo"});
  NamedDatum more = ratio_datum();
  more.inputs["mask"] = floats({3}, {1, 1, 1});
  expect(error_of("ppo", more), {"datum 1", "mask", "advantages"});
  NamedDatum wide = ratio_datum();
  for (auto& [name, tensor] : wide.inputs) tensor.shape = {3, 1};
  expect(error_of("ppo", wide), {"datum 1", "one dimension"});
  NamedDatum shape =
      datum({{"target_tokens", integers({3, 2}, {1, 2, 3, 4, 5, 6})}, {"weights", floats({3}, {1, 1, 1})}});
  expect(error_of("cross_entropy", shape), {"datum 1: weights", "[3, 2]", "[3]"});
  NamedDatum infinite = ratio_datum();
  infinite.inputs["advantages"].floats[2] = std::numeric_limits<float>::infinity();
  expect(error_of("ppo", infinite), {"datum 1: advantages[2]", "finite"});
  NamedDatum swapped = ratio_datum();
  swapped.inputs["target_tokens"] = floats({3}, {1, 2, 3});
  expect(error_of("ppo", swapped), {"datum 1: target_tokens", "int64"});
  NamedDatum beyond = ratio_datum();
  beyond.inputs["target_tokens"].integers[1] = 10;
  expect(error_of("ppo", beyond), {"datum 1: target_tokens", "[0, 10)", "10"});
  NamedDatum longer = ratio_datum();
  longer.tokens.resize(7, 1);
  expect(error_of("ppo", longer), {"datum 1: model_input", "6", "7"});
  expect(error_of("ppo", ratio_datum(), {{"beta", 0.1}}), {"loss_fn_config", "beta", "clip_low_threshold"});
  expect(error_of("dro", ratio_datum(), {{"beta", std::string("much")}}), {"beta", "finite number", "much"});
  expect(error_of("ppo", ratio_datum(), {{"clip_low_threshold", 1.3}}), {"1.3", "1.2"});
  NamedDatum crossed = ratio_datum();
  crossed.inputs["clip_low_threshold"] = floats({3}, {0.5f, 2.0f, 0.5f});
  expect(error_of("ppo", crossed), {"datum 1: clip_low_threshold[1]"});
  EXPECT_THROW(training_call("ppo", {}, true, {}, kModel), InputError);
}

}  // namespace
}  // namespace espalier::serve
