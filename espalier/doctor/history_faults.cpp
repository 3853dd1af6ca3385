#include "espalier/doctor/history_faults.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "espalier/base/error.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

using Ids = std::span<const std::int32_t>;

struct Change {
  std::int64_t turn = 0;             // the rollout with the changed prompt
  std::size_t place = 0;             // of the first other token
  std::vector<std::int32_t> before;  // the turn before it: prompt and response
  std::size_t begin = 0, end = 0;    // of `before`: tokens that stand otherwise, up to where both continue alike
  std::size_t other_end = 0;         // of the new prompt, from `begin` on
  bool rejoins = false;              // and they do continue alike
};

std::vector<std::int32_t> whole(const Rollout& rollout) {
  std::vector<std::int32_t> out = rollout.prompt_ids;
  out.insert(out.end(), rollout.response_ids.begin(), rollout.response_ids.end());
  return out;
}

std::size_t equal_from(Ids a, Ids b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// Where the rest of `before` stands in `now` again: the fewest tokens left out of both.
void find_end(Change& change, Ids now) {
  constexpr std::size_t kFewest = 4;  // tokens alike that are no coincidence
  const Ids before(change.before);
  const std::size_t rest = before.size() - change.begin;
  for (std::size_t left_out = 0; left_out < 2 * rest; ++left_out)
    for (std::size_t own = 0; own <= std::min(left_out, rest); ++own) {
      const std::size_t a = change.begin + own, b = change.begin + left_out - own;
      if (b > now.size() || before.size() - a > now.size() - b) continue;
      if (before.size() - a < std::min(kFewest, rest) && a != before.size()) continue;
      if (a == before.size() || equal_from(before.subspan(a), now.subspan(b)) == before.size() - a) {
        change.end = a, change.other_end = b, change.rejoins = a < before.size();
        return;
      }
    }
  change.end = before.size(), change.other_end = std::min(now.size(), change.begin + rest);
}

std::vector<Change> changes_of(std::span<const Rollout> rollouts) {
  std::vector<Change> out;
  for (const std::vector<std::int64_t>& turns : trajectories_of(rollouts).turns)
    for (std::size_t k = 1; k < turns.size(); ++k) {
      const Rollout& now = rollouts[static_cast<std::size_t>(turns[k])];
      const Rollout* before = nullptr;  // the turn before it on its branch; a turn without a branch lies on all
      for (std::size_t j = k; j-- > 0 && before == nullptr;) {
        const Rollout& other = rollouts[static_cast<std::size_t>(turns[j])];
        if (other.branch == now.branch || other.branch.empty() || now.branch.empty()) before = &other;
      }
      if (before == nullptr) continue;
      const Rollout& last = *before;
      Change change{turns[k], 0, whole(last), 0, 0, 0, false};
      change.begin = change.place = equal_from(change.before, now.prompt_ids);
      // A record of all turns so far begins at the first prompt, and so does the next one.
      if (change.begin == now.prompt_ids.size() && now.prompt_ids == last.prompt_ids) continue;
      if (change.begin == change.before.size()) continue;
      find_end(change, now.prompt_ids);
      out.push_back(std::move(change));
    }
  return out;
}

Ids part(Ids ids, std::size_t begin, std::size_t end) { return ids.subspan(begin, end - begin); }

// True if the tokens that stand otherwise have one text: a beginning of the longer one's where neither continues alike.
std::vector<std::uint8_t> equal_texts(std::span<const Change> changes, std::span<const Rollout> rollouts,
                                      Tokenizer& tokenizer) {
  std::vector<Ids> ids;
  for (const Change& change : changes) {
    const Ids now(rollouts[static_cast<std::size_t>(change.turn)].prompt_ids);
    ids.push_back(part(change.before, change.begin, change.end));
    ids.push_back(change.rejoins ? part(now, change.begin, change.other_end) : now.subspan(change.begin));
  }
  const std::vector<std::string> texts = tokenizer.decode(ids, false);
  std::vector<std::uint8_t> out;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const std::string &own = texts[2 * i], &other = texts[2 * i + 1];
    out.push_back(changes[i].rejoins ? own == other : !own.empty() && other.starts_with(own));
  }
  return out;
}

}  // namespace

std::vector<Finding> history_faults(std::span<const Rollout> rollouts, Tokenizer* tokenizer) {
  const std::vector<Change> changes = changes_of(rollouts);
  if (changes.empty()) return {};
  constexpr std::size_t kFew = 8;  // tokens that a text may be cut into otherwise, without a tokenizer to tell
  std::vector<std::uint8_t> same;
  if (tokenizer != nullptr)
    same = equal_texts(changes, rollouts, *tokenizer);
  else
    for (const Change& change : changes)
      same.push_back(change.rejoins && change.end > change.begin && change.other_end > change.begin &&
                     change.end + change.other_end - 2 * change.begin <= kFew);
  std::vector<Finding> out;
  for (const bool again : {true, false}) {
    std::vector<std::int64_t> rows;
    const Change* first = nullptr;
    for (std::size_t i = 0; i < changes.size(); ++i) {
      if ((same[i] != 0) != again) continue;
      if (first == nullptr) first = &changes[i];
      rows.push_back(changes[i].turn);
    }
    if (rows.empty()) continue;
    std::ranges::sort(rows);
    const std::string where =
        text_of(" (in ", rollouts[static_cast<std::size_t>(first->turn)].where, " from token ", first->place, " on)");
    const std::string turns = text_of("the prompts of ", rows.size(), " turns");
    if (again)
      out.push_back({Fault::retokenized_turns, tokenizer != nullptr ? Sure::certain : Sure::likely, std::move(rows),
                     turns + " have the text of the turn before in other tokens" + where});
    else
      out.push_back(
          {Fault::changed_history, tokenizer != nullptr ? Sure::certain : Sure::likely, std::move(rows),
           turns + " do not begin with the tokens of the turn before: the history was rendered otherwise" + where});
  }
  return out;
}

}  // namespace espalier
