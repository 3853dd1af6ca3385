#include "espalier/grouping/inspection.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <unordered_map>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/grouping/shared_tokens.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/record_data.h"
#include "espalier/rollout/token_hash.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

using Members = std::vector<std::int64_t>;

double quantile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

Quantiles quantiles_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {quantile(values, 0), quantile(values, 0.5), quantile(values, 0.95), quantile(values, 1)};
}

struct Tokens {
  std::int64_t logical = 0, physical = 0;
};

Tokens tokens_of(const std::vector<PrefixTree>& forest) {
  Tokens sum;
  for (const PrefixTree& tree : forest) {
    sum.logical += tree.logical_tokens();
    sum.physical += tree.physical_tokens();
  }
  return sum;
}

// A rollout's place in its trajectory, from 0.
std::vector<std::int64_t> turn_places(const Trajectories& trajectories) {
  std::vector<std::int64_t> out(trajectories.of.size());
  for (const Members& turns : trajectories.turns)
    for (std::size_t k = 0; k < turns.size(); ++k)
      out[static_cast<std::size_t>(turns[k])] = static_cast<std::int64_t>(k);
  return out;
}

// Adds the tokens of each node to the earliest turn that has them. `place`: of the forest's rollouts.
void add_physical_by_turn(const std::vector<PrefixTree>& forest, std::span<const std::int64_t> place,
                          std::vector<Inspection::Turn>& out) {
  for (const PrefixTree& tree : forest) {
    std::vector<std::int64_t> earliest(tree.nodes.size(), std::numeric_limits<std::int64_t>::max());
    for (std::size_t n = tree.nodes.size(); n-- > 0;) {
      const PrefixNode& node = tree.nodes[n];
      for (const std::int32_t rollout : node.ends_here)
        earliest[n] = std::min(earliest[n], place[static_cast<std::size_t>(rollout)]);
      out[static_cast<std::size_t>(earliest[n])].physical_tokens += node.length();
      if (node.parent < 0) continue;
      std::int64_t& above = earliest[static_cast<std::size_t>(node.parent)];
      above = std::min(above, earliest[n]);
    }
  }
}

// The fields that trajectories and their rewards are told from, with rewards settled.
std::vector<Rollout> settled_lineage(std::span<const Rollout> rollouts) {
  std::vector<Rollout> out(rollouts.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i].group = rollouts[i].group, out[i].step = rollouts[i].step;
    out[i].trajectory = rollouts[i].trajectory, out[i].turn = rollouts[i].turn, out[i].branch = rollouts[i].branch;
    out[i].reward = rollouts[i].reward, out[i].where = rollouts[i].where;
  }
  settle_turn_rewards(out, TurnRewards::automatic);
  return out;
}

std::int64_t line_of(const std::string& where) {
  const auto colon = where.rfind(':');
  return colon == std::string::npos ? 0 : std::atoll(where.c_str() + colon + 1);
}

// Looks at each rollout, then at each group, and keeps what is odd.
class Finder {
 public:
  Finder(std::span<const Rollout> rollouts, std::vector<Anomaly>& out)
      : rollouts_(rollouts),
        out_(out),
        trajectories_(trajectories_of(rollouts)),
        rewards_(rewards_of(settled_lineage(rollouts), trajectories_)) {}

  void look_at_rollouts() {
    const Rollout *with_step = nullptr, *without_step = nullptr;
    for (const Rollout& rollout : rollouts_) {
      (rollout.step ? with_step : without_step) = &rollout;
      const bool masked = std::count(rollout.loss_mask.begin(), rollout.loss_mask.end(), 1) == 0;
      if (rollout.response_ids.empty())
        add(rollout, "empty_response", "the response has no token");
      else if (masked)
        add(rollout, "fully_masked", "loss_mask is all 0: no token has loss");
      for (const SeriesRow& row : series_rows())
        if (row.is_logprob()) look_for_positive(rollout, row.name, rollout.*row.values);
      if (!rollout.response_ids.empty() && !reward_of(&rollout - rollouts_.data()) && rollout.advantages.empty() &&
          rollout.pair.pair < 0)
        add(rollout, "nothing_to_learn", "neither reward nor advantage");
    }
    if (with_step != nullptr && without_step != nullptr)
      add(*without_step, "partial_steps", "no step here, but one at " + with_step->where);
  }

  void look_at_group(const Members& members) {
    const Rollout& first = at(members[0]);
    const std::int64_t trajectories = std::ranges::count_if(members, [&](std::int64_t i) { return is_first_turn(i); });
    look_for_duplicates(members);
    if (trajectories == 1)
      return add(first, "group_of_one",
                 members.size() == 1 ? "its group has no other rollout to compare with"
                                     : "its group has no other trajectory to compare with");
    const std::optional<double> reward = reward_of(members[0]);
    bool rewards_equal = true;
    for (const std::int64_t index : members) {
      const Rollout& rollout = at(index);
      rewards_equal &= reward && reward_of(index) == reward && rollout.advantages.empty();
      if (rollout.prompt_ids == first.prompt_ids || !is_first_turn(index) || !is_first_turn(members[0])) continue;
      const auto parted = std::mismatch(rollout.prompt_ids.begin(), rollout.prompt_ids.end(), first.prompt_ids.begin(),
                                        first.prompt_ids.end());
      add(rollout, "prompt_differs",
          text_of("its prompt differs from that of ", first.where, " (same group) at token ",
                  parted.first - rollout.prompt_ids.begin(), " of ", rollout.prompt_ids.size()));
    }
    if (!rewards_equal) return;
    add(first, "equal_rewards", text_of("all ", trajectories, " rewards of its group are ", *reward));
    ++equal_groups_;
  }

  // Loss tokens that occur again, in the group's trajectories and between them.
  void look_for_repeats(const Members& members, Inspection::Repeated& count) {
    if (at(members[0]).pair.pair >= 0) return;  // answers to compare
    for (const RepeatedTokens& repeat : repeated_tokens(rollouts_, members)) {
      const Rollout &rollout = at(repeat.rollout), &earlier = at(repeat.earlier);
      const std::int64_t of = trajectories_.of[static_cast<std::size_t>(repeat.rollout)];
      const bool same = of == trajectories_.of[static_cast<std::size_t>(repeat.earlier)];
      const Members& turns = trajectories_.turns[static_cast<std::size_t>(of)];
      if (same && branches_of(rollouts_, turns).size() > 1) {
        count.branches += repeat.tokens;
      } else if (same) {
        count.trajectory += repeat.tokens;
        add(rollout, "repeated_tokens",
            text_of(repeat.tokens, " of its sampled tokens are also those of ", earlier.where,
                    " (same trajectory) and train in both; if the run branches here, add branch"));
      } else {
        count.rollouts += repeat.tokens;
        if (continues(rollout, earlier))
          add(rollout, "repeated_tokens",
              text_of("it continues ", earlier.where, ", whose ", repeat.tokens,
                      " sampled tokens train in both; turns and branches of one run have one trajectory, and a token's "
                      "loss_mask is 1 in one record"));
      }
    }
  }

  // Recorded advantages of the turns of a trajectory are one number under one outcome, and rarely 0 for some turns
  // alone.
  void look_at_advantages() {
    for (const Members& turns : trajectories_.turns) {
      const Rollout* other = nullptr;      // the first turn with an advantage
      std::optional<double> its_constant;  // its advantage, if one number
      for (const std::int64_t index : turns) {
        const std::vector<double> advantages = advantages_with_loss(at(index));
        if (is_zero(advantages)) continue;
        const bool constant = std::ranges::count(advantages, advantages.front()) == std::ssize(advantages);
        if (other == nullptr) {
          other = &at(index);
          if (constant) its_constant = advantages.front();
        } else if (constant && its_constant && *its_constant != advantages.front() && !rewards_differ(turns)) {
          add(at(index), "unequal_advantages",
              text_of("its recorded advantage is ", advantages.front(), ", that of ", other->where,
                      ", another turn of its trajectory, ", *its_constant));
        }
      }
      if (other == nullptr) continue;
      for (const std::int64_t index : turns)
        if (const auto advantages = advantages_with_loss(at(index)); !advantages.empty() && is_zero(advantages))
          add(at(index), "zero_advantages",
              text_of("its recorded advantages are 0 at all ", advantages.size(),
                      " tokens with loss, but not those of ", other->where, ", another turn of its trajectory"));
    }
  }

  // Groups of one have no other reward to differ from, so they change nothing here.
  void look_at_all(std::int64_t groups_of_many) {
    if (groups_of_many > 0 && equal_groups_ == groups_of_many)
      add(rollouts_.front(), "no_signal",
          "no group has unequal rewards: all advantages relative to the group are 0, and an update learns nothing");
  }

 private:
  const Rollout& at(std::int64_t index) const { return rollouts_[static_cast<std::size_t>(index)]; }
  const std::optional<double>& reward_of(std::int64_t index) const {
    return rewards_[static_cast<std::size_t>(trajectories_.of[static_cast<std::size_t>(index)])];
  }
  bool is_first_turn(std::int64_t index) const {
    const auto of = static_cast<std::size_t>(trajectories_.of[static_cast<std::size_t>(index)]);
    return trajectories_.turns[of].front() == index;
  }
  void add(const Rollout& rollout, const char* kind, std::string text) {
    out_.push_back({&rollout - rollouts_.data(), line_of(rollout.where), rollout.where, kind, std::move(text)});
  }

  // The tokens of `earlier` are the beginning of the rollout's.
  static bool continues(const Rollout& rollout, const Rollout& earlier) {
    if (earlier.length() >= rollout.length() || earlier.response_ids.empty()) return false;
    for (std::int32_t depth = 0; depth < earlier.length(); ++depth)
      if (rollout.token_at(depth) != earlier.token_at(depth)) return false;
    return true;
  }
  static std::vector<double> advantages_with_loss(const Rollout& rollout) {
    std::vector<double> out;
    for (std::size_t t = 0; t < rollout.advantages.size(); ++t)
      if (rollout.loss_mask[t] != 0) out.push_back(rollout.advantages[t]);
    return out;
  }
  static bool is_zero(const std::vector<double>& advantages) {
    return std::ranges::all_of(advantages, [](double advantage) { return advantage == 0; });
  }
  bool rewards_differ(const Members& turns) const {
    const std::optional<double>* first = nullptr;
    for (const std::int64_t index : turns) {
      if (!at(index).reward) continue;
      if (first != nullptr && *first != at(index).reward) return true;
      first = &at(index).reward;
    }
    return false;
  }

  // A probability is at most 1. Where float32 rounds log-sum-exp of logits up to 1,000, 6e-5 may be left above 0.
  void look_for_positive(const Rollout& rollout, std::string_view field, const std::vector<double>& logprobs) {
    constexpr double kRounding = 1e-4;
    const auto found = std::ranges::find_if(logprobs, [](double value) { return value > kRounding; });
    if (found != logprobs.end())
      add(rollout, "positive_logprob",
          text_of(field, "[", found - logprobs.begin(), "] is ", *found,
                  ", but the logarithm of a probability is at most 0"));
  }

  void look_for_duplicates(const Members& members) {
    std::unordered_multimap<std::uint64_t, const Rollout*> seen;
    for (const std::int64_t index : members) {
      const Rollout& rollout = at(index);
      if (rollout.response_ids.empty()) continue;
      const std::uint64_t hash = hash_of_tokens(rollout.response_ids);
      const auto [begin, end] = seen.equal_range(hash);
      const auto twin = std::find_if(begin, end, [&](const auto& entry) {
        return entry.second->response_ids == rollout.response_ids && entry.second->prompt_ids == rollout.prompt_ids;
      });
      if (twin == end)
        seen.emplace(hash, &rollout);
      else
        add(rollout, "duplicate_response", "same tokens as " + twin->second->where);
    }
  }

  std::span<const Rollout> rollouts_;
  std::vector<Anomaly>& out_;
  Trajectories trajectories_;
  std::vector<std::optional<double>> rewards_;  // one per trajectory
  std::int64_t equal_groups_ = 0;
};

void count_tokens(std::span<const Rollout> rollouts, const std::vector<Members>& groups, Inspection& out) {
  const Trajectories trajectories = trajectories_of(rollouts);
  const std::vector<std::int64_t> places = turn_places(trajectories);
  const bool by_turn =
      std::ranges::any_of(rollouts, [](const Rollout& rollout) { return !rollout.trajectory.empty(); });
  if (by_turn) {
    std::vector<double> turns;
    for (const Members& members : trajectories.turns) turns.push_back(static_cast<double>(members.size()));
    out.trajectories = static_cast<std::int64_t>(turns.size());
    out.turns = quantiles_of(std::move(turns));
    out.by_turn.resize(static_cast<std::size_t>(out.turns.max));
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      Inspection::Turn& turn = out.by_turn[static_cast<std::size_t>(places[i])];
      turn.rollouts += 1, turn.logical_tokens += rollouts[i].length();
    }
  }
  std::vector<double> shares;
  std::vector<Rollout> part;  // trees are built over contiguous rollouts
  std::vector<std::int64_t> part_places;
  const auto counted = [&](const Members& members, bool counts_turns) {
    part.clear(), part_places.clear();
    for (const std::int64_t index : members) {
      const Rollout& rollout = rollouts[static_cast<std::size_t>(index)];
      Rollout& copy = part.emplace_back();
      copy.prompt_ids = rollout.prompt_ids;
      copy.response_ids = rollout.response_ids;
      copy.recorded_experts = rollout.recorded_experts;
      part_places.push_back(places[static_cast<std::size_t>(index)]);
    }
    const std::vector<PrefixTree> forest = build_prefix_trees(part, ShareMode::whole_trees);
    if (counts_turns && by_turn) add_physical_by_turn(forest, part_places, out.by_turn);
    return tokens_of(forest);
  };
  for (const Members& members : groups) {
    const Tokens tokens = counted(members, false);
    shares.push_back(1 - static_cast<double>(tokens.physical) / static_cast<double>(tokens.logical));
  }
  out.prefix_share = quantiles_of(std::move(shares));

  std::map<std::int64_t, Members> sets;
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    if (rollouts[i].pair.pair >= 0) sets[rollouts[i].pair.pair].push_back(static_cast<std::int64_t>(i));
  std::vector<double> answers, of_sets;
  for (const auto& [number, members] : sets) {
    ++(rollouts[static_cast<std::size_t>(members[0])].pair.score ? out.lists : out.pairs);
    const Tokens tokens = counted(members, false);
    answers.push_back(static_cast<double>(members.size()));
    of_sets.push_back(1 - static_cast<double>(tokens.physical) / static_cast<double>(tokens.logical));
  }
  if (!sets.empty()) out.answers = quantiles_of(std::move(answers)), out.set_share = quantiles_of(std::move(of_sets));

  std::map<std::int64_t, Members> steps;
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    if (rollouts[i].step) steps[*rollouts[i].step].push_back(static_cast<std::int64_t>(i));
  out.steps = static_cast<std::int64_t>(steps.size());
  Tokens all;
  if (all_have_step(rollouts) && steps.size() > 1) {
    for (const auto& [step, members] : steps) {
      const Tokens tokens = counted(members, true);
      all.logical += tokens.logical;
      all.physical += tokens.physical;
    }
  } else {
    const std::vector<PrefixTree> forest = build_prefix_trees(rollouts, ShareMode::whole_trees);
    if (by_turn) add_physical_by_turn(forest, places, out.by_turn);
    all = tokens_of(forest);
  }
  out.logical_tokens = all.logical;
  out.physical_tokens = all.physical;
}

void count_series(std::span<const Rollout> rollouts, Inspection& out) {
  const auto count = [&](std::string_view field, const auto& has) {
    const auto with = std::count_if(rollouts.begin(), rollouts.end(), has);
    if (with == static_cast<std::ptrdiff_t>(rollouts.size()))
      out.series.emplace_back(field);
    else if (with > 0)
      out.series.push_back(text_of(field, " (", with, " of ", rollouts.size(), ")"));
  };
  count("reward", [](const Rollout& r) { return r.reward.has_value(); });
  count("advantage", [](const Rollout& r) { return !r.advantages.empty(); });
  for (const SeriesRow& row : series_rows())
    count(row.name, [&](const Rollout& r) { return !(r.*row.values).empty(); });
  count("routed_experts", [](const Rollout& r) { return r.recorded_experts.tokens > 0; });
  count("kept_ids", [](const Rollout& r) { return !r.kept_sets.empty(); });
}

}  // namespace

double Inspection::saved_share() const {
  return logical_tokens == 0 ? 0 : 1 - static_cast<double>(physical_tokens) / static_cast<double>(logical_tokens);
}

Inspection inspect_rollouts(std::span<const Rollout> rollouts) {
  Inspection out;
  out.rollouts = static_cast<std::int64_t>(rollouts.size());
  const std::vector<Members> groups = groups_of(rollouts);
  out.groups = static_cast<std::int64_t>(groups.size());

  std::vector<double> sizes, prompts, responses;
  for (const Members& members : groups) sizes.push_back(static_cast<double>(members.size()));
  for (const Rollout& rollout : rollouts) {
    prompts.push_back(rollout.prompt_length());
    responses.push_back(rollout.response_length());
    out.loss_tokens += std::count(rollout.loss_mask.begin(), rollout.loss_mask.end(), 1);
  }
  out.group_size = quantiles_of(std::move(sizes));
  out.prompt_length = quantiles_of(std::move(prompts));
  out.response_length = quantiles_of(std::move(responses));
  count_tokens(rollouts, groups, out);
  count_series(rollouts, out);

  Finder finder(rollouts, out.anomalies);
  finder.look_at_rollouts();
  for (const Members& members : groups) {
    finder.look_at_group(members);
    finder.look_for_repeats(members, out.repeated);
  }
  finder.look_at_advantages();
  finder.look_at_all(std::ranges::count_if(groups, [](const Members& members) { return members.size() > 1; }));
  std::stable_sort(out.anomalies.begin(), out.anomalies.end(),
                   [](const Anomaly& a, const Anomaly& b) { return a.rollout < b.rollout; });
  return out;
}

Json inspection_json(const Inspection& inspection) {
  const auto four = [](const Quantiles& q) {
    return Json{{"min", q.min}, {"p50", q.p50}, {"p95", q.p95}, {"max", q.max}};
  };
  Json anomalies = Json::array();
  for (const Anomaly& anomaly : inspection.anomalies)
    anomalies.push_back(
        {{"line", anomaly.line}, {"kind", anomaly.kind}, {"text", anomaly.text}, {"where", anomaly.where}});
  Json out{{"rollouts", inspection.rollouts},
           {"groups", inspection.groups},
           {"steps", inspection.steps},
           {"tokens",
            {{"logical", inspection.logical_tokens},
             {"physical", inspection.physical_tokens},
             {"loss", inspection.loss_tokens}}},
           {"saved_share", inspection.saved_share()},
           {"repeated_tokens",
            {{"branches", inspection.repeated.branches},
             {"trajectory", inspection.repeated.trajectory},
             {"rollouts", inspection.repeated.rollouts}}},
           {"prefix_share", four(inspection.prefix_share)},
           {"n", four(inspection.group_size)},
           {"prompt_length", four(inspection.prompt_length)},
           {"response_length", four(inspection.response_length)},
           {"series", inspection.series},
           {"anomalies", std::move(anomalies)}};
  if (inspection.pairs + inspection.lists > 0)
    out["sets"] = {{"pairs", inspection.pairs},
                   {"lists", inspection.lists},
                   {"answers", four(inspection.answers)},
                   {"saved_share", four(inspection.set_share)}};
  if (inspection.trajectories == 0) return out;
  out["trajectories"] = inspection.trajectories;
  out["turns"] = four(inspection.turns);
  for (const Inspection::Turn& turn : inspection.by_turn)
    out["by_turn"].push_back({{"turn", out["by_turn"].size()},
                              {"rollouts", turn.rollouts},
                              {"logical", turn.logical_tokens},
                              {"physical", turn.physical_tokens}});
  return out;
}

}  // namespace espalier
