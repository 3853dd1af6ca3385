#include "espalier/rollout/kept_sets_field.h"

#include <algorithm>
#include <string>
#include <utility>

#include "espalier/rollout/json_text.h"
#include "espalier/rollout/kept_sets.h"

namespace espalier {
namespace {

constexpr const char* kExpected = "a list with the kept ids of each response token, or null for a token";

// The sets without those at `dropped`, which ascend.
KeptSets without(const KeptSets& sets, const std::vector<std::size_t>& dropped) {
  KeptSets out;
  auto next = dropped.begin();
  for (std::size_t t = 0; t + 1 < sets.begin.size(); ++t) {
    const bool drop = next != dropped.end() && *next == t;
    if (drop) ++next;
    add_kept_set(out, drop ? std::span<const std::int32_t>{} : sets.at(t));
  }
  return out;
}

}  // namespace

void read_kept_ids(JsonValue value, const RecordPlace& place, std::string_view field, std::int64_t vocabulary,
                   KeptIds& out) {
  out = {};
  simdjson::ondemand::array list;
  if (value.get_array().get(list)) throw place.wrong(field, kExpected, "another JSON value");
  out.sets.begin.push_back(0);
  std::vector<std::int32_t> ids;
  std::string name(field);
  for (auto element : list) {
    JsonValue item;
    if (element.get(item)) throw place.wrong(field, kExpected, "a list with invalid JSON");
    ids.clear();
    if (!is_null(item)) {
      const std::size_t token = out.sets.begin.size() - 1;
      name.resize(field.size());
      name += '[';
      append_number(name, static_cast<std::int64_t>(token));
      name += ']';
      read_token_ids(item, place, name, vocabulary, ListShape::flat, ids);
      if (ids.empty()) out.empty.push_back(token);
    }
    add_kept_set(out.sets, ids);
  }
}

void give_kept_sets(KeptIds&& kept, const RecordPlace& place, std::string_view field, Rollout& rollout) {
  KeptSets& sets = kept.sets;
  if (sets.begin.empty()) return;
  const std::size_t tokens = rollout.response_ids.size(), have = sets.begin.size() - 1;
  if (have != tokens) throw place.wrong(field, text_of(tokens, " entries, one per response token"), text_of(have));
  std::vector<std::size_t> dropped;
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::int32_t id = rollout.response_ids[t];
    const bool is_empty = std::ranges::binary_search(kept.empty, t);
    if (!is_empty && keeps(sets, t, id)) continue;
    if (rollout.loss_mask[t])
      throw place.wrong(text_of(field, "[", t, "]"), text_of("the sampled token ", id, " among the kept ids"),
                        is_empty ? "an empty list" : text_of(sets.at(t).size(), " ids without it"),
                        "Are these the sets of this response, one for each token? null stands for a token whose set "
                        "was not recorded");
    if (!is_empty) dropped.push_back(t);
  }
  if (!dropped.empty()) sets = without(sets, dropped);
  if (sets.ids.empty()) return;
  sets.ids.shrink_to_fit(), sets.begin.shrink_to_fit();
  rollout.kept_sets = std::move(sets);
}

}  // namespace espalier
