#include "tests/support/make_rollouts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "espalier/base/random.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/rollout/writer.h"

namespace espalier::testing {
namespace {

using Tokens = std::vector<std::int32_t>;

std::int64_t drawn(Random& random, IntRange range) { return random.integer(range.low, range.high); }

class Maker {
 public:
  Maker(const RolloutOptions& options, std::uint64_t seed)
      : options_(options), random_(seed), random_of_sets_(seed, 0x6e7) {}

  std::vector<Rollout> make() {
    std::vector<Rollout> rollouts;
    for (std::int64_t g = 0; g < options_.groups; ++g) {
      prompts_.push_back(make_prompt());
      std::vector<Tokens> responses;
      const std::int64_t size = drawn(random_, options_.group_size);
      for (std::int64_t i = 0; i < size; ++i) {
        responses.push_back(make_response(responses));
        Rollout rollout;
        rollout.prompt_ids = prompts_.back();
        rollout.response_ids = responses.back();
        if (options_.named_groups) rollout.group = "\"g" + std::to_string(g) + "\"";
        if (options_.steps > 0) rollout.step = 1 + g * options_.steps / options_.groups;
        add_series(rollout);
        if (random_of_sets_.chance(options_.kept_sets)) add_kept_sets(rollout, g);
        rollouts.push_back(std::move(rollout));
      }
    }
    if (options_.shuffled)
      for (std::int64_t last = static_cast<std::int64_t>(rollouts.size()) - 1; last > 0; --last)
        std::swap(rollouts[static_cast<std::size_t>(last)],
                  rollouts[static_cast<std::size_t>(random_.integer(0, last))]);
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      rollouts[i].index = static_cast<std::int64_t>(i);
      rollouts[i].where = "generated.jsonl:" + std::to_string(i + 1);
    }
    return rollouts;
  }

 private:
  std::int32_t token() { return static_cast<std::int32_t>(random_.integer(0, options_.vocabulary - 1)); }
  void append_tokens(Tokens& out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) out.push_back(token());
  }
  const Tokens& any_of(const std::vector<Tokens>& earlier) {
    return earlier[static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(earlier.size()) - 1))];
  }

  Tokens make_prompt() {
    Tokens prompt;
    const std::int64_t length = std::max<std::int64_t>(1, drawn(random_, options_.prompt_length));
    if (random_.chance(options_.one_token_prompt)) return {token()};
    if (!prompts_.empty() && random_.chance(options_.nested_prompt)) {
      prompt = any_of(prompts_);
      append_tokens(prompt, 1 + length / 2);
    } else if (!prompts_.empty() && random_.chance(options_.late_difference)) {
      prompt = any_of(prompts_);
      const auto changed = std::min<std::size_t>(prompt.size(), 1 + static_cast<std::size_t>(random_.integer(0, 1)));
      for (std::size_t i = prompt.size() - changed; i < prompt.size(); ++i)
        prompt[i] = static_cast<std::int32_t>((prompt[i] + 1) % options_.vocabulary);
    } else {
      append_tokens(prompt, length);
    }
    return prompt;
  }

  Tokens make_response(const std::vector<Tokens>& earlier) {
    if (random_.chance(options_.empty_response)) return {};
    const std::int64_t length = drawn(random_, options_.response_length);
    Tokens response;
    if (!earlier.empty()) {
      const Tokens& model = any_of(earlier);
      if (random_.chance(options_.equal_response)) return model;
      if (random_.chance(options_.continues)) {
        response = model;
      } else if (!model.empty() && random_.chance(options_.shared_start)) {
        response.assign(model.begin(), model.begin() + random_.integer(1, static_cast<std::int64_t>(model.size())));
      }
    }
    append_tokens(response, length);
    return response;
  }

  void add_series(Rollout& rollout) {
    const std::size_t length = rollout.response_ids.size();
    rollout.loss_mask.assign(length, 1);
    if (random_.chance(options_.fully_masked)) rollout.loss_mask.assign(length, 0);
    if (length > 0 && random_.chance(options_.mask_gap)) {
      const std::int64_t begin = random_.integer(0, static_cast<std::int64_t>(length) - 1);
      const std::int64_t end = random_.integer(begin, static_cast<std::int64_t>(length));
      std::fill(rollout.loss_mask.begin() + begin, rollout.loss_mask.begin() + end, std::uint8_t{0});
    }
    if (options_.rewards) rollout.reward = static_cast<double>(random_.integer(0, 8)) / 4;
    if (options_.token_advantages)
      for (std::size_t t = 0; t < length; ++t) rollout.advantages.push_back(random_.normal());
    rollout.temperature = random_.uniform(options_.temperature_low, options_.temperature_high);
    if (options_.values)
      for (std::size_t t = 0; t < length; ++t) {
        rollout.values.push_back(random_.normal());
        rollout.returns.push_back(std::fma(0.3, random_.normal(), rollout.values.back()));
      }
    if (options_.policy == PolicyAge::none) return;
    const double apart = options_.policy == PolicyAge::far ? 1.0 : 0.1;
    // A fresh model over V tokens gives each about -ln V; a trained one more to those it sampled.
    const double level = -2.5;
    for (std::size_t t = 0; t < length; ++t) {
      const double own = std::min(-1e-3, level + random_.normal());
      rollout.old_logprobs.push_back(own);
      rollout.ref_logprobs.push_back(std::min(-1e-3, std::fma(apart, random_.normal(), own)));
      rollout.rollout_logprobs.push_back(std::min(-1e-3, std::fma(apart, random_.normal(), own)));
    }
  }

  // Half of the sets depend on group and position alone, but for the token itself.
  void add_kept_sets(Rollout& rollout, std::int64_t group) {
    for (std::int32_t t = 0; t < rollout.response_length(); ++t) {
      Random of_position(static_cast<std::uint64_t>(1000 * group + t), 0x5e7);
      Random& random = random_of_sets_.chance(0.5) ? of_position : random_of_sets_;
      std::vector<std::int32_t> ids;
      for (std::int64_t i = random.integer(0, options_.vocabulary); i > 0; --i)
        ids.push_back(static_cast<std::int32_t>(random.integer(0, options_.vocabulary - 1)));
      ids.push_back(rollout.response_ids[static_cast<std::size_t>(t)]);
      if (random_of_sets_.chance(0.2)) ids.clear();
      add_kept_set(rollout.kept_sets, ids);
    }
    if (rollout.kept_sets.ids.empty()) rollout.kept_sets = {};
  }

  const RolloutOptions& options_;
  Random random_, random_of_sets_;  // the latter apart, so that everything else is the same with sets as without
  std::vector<Tokens> prompts_;
};

}  // namespace

std::vector<Rollout> make_rollouts(const RolloutOptions& options, std::uint64_t seed) {
  return Maker(options, seed).make();
}

RolloutOptions any_options(std::uint64_t seed, std::int64_t most_rollouts) {
  Random random(seed, 0x0b71);
  RolloutOptions options;
  options.group_size = {1, random.integer(1, std::min<std::int64_t>(6, most_rollouts))};
  options.groups = random.integer(1, std::max<std::int64_t>(1, most_rollouts / options.group_size.high));
  options.prompt_length = {1, random.integer(1, 20)};
  options.response_length = {random.integer(0, 2), random.integer(2, 16)};
  options.vocabulary = random.chance(0.3) ? 3 : 50;  // three tokens: accidental sharing everywhere
  options.shuffled = random.chance(0.5);
  options.named_groups = random.chance(0.7);
  for (double* chance :
       {&options.one_token_prompt, &options.nested_prompt, &options.late_difference, &options.empty_response,
        &options.equal_response, &options.shared_start, &options.continues, &options.mask_gap, &options.fully_masked})
    *chance = random.chance(0.5) ? random.uniform(0, 0.5) : 0;
  options.policy = static_cast<PolicyAge>(random.integer(0, 2));
  options.token_advantages = random.chance(0.3);
  options.values = random.chance(0.3);
  if (random.chance(0.3)) options.temperature_low = 0.5, options.temperature_high = 1.5;
  if (random.chance(0.3)) options.kept_sets = random.chance(0.5) ? 1 : 0.5;
  return options;
}

void write_jsonl(const std::string& path, const std::vector<Rollout>& rollouts) {
  RolloutWriter writer(path);
  for (const Rollout& rollout : rollouts) writer.write(rollout);
  writer.finish();
}

}  // namespace espalier::testing
