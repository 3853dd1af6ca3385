#include "espalier/rollout/record_data.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {
namespace {

struct NeedRow {
  std::string_view field;
  const char* option;
  bool (*holds)(const Options& options);
  const char* remedy;
};

constexpr NeedRow kNeeds[] = {
#define ESPALIER_RECORD_NEED(field, option, condition, remedy) \
  {#field, option, [](const Options& options) { return bool(condition); }, remedy},
#include "espalier/rollout/record_data.def"
};

template <class Row>
const Row* find_row(std::span<const Row> rows, std::string_view name) {
  const auto found = std::ranges::find(rows, name, &Row::name);
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace

std::span<const SeriesRow> series_rows() {
  static constexpr SeriesRow kRows[] = {
#define ESPALIER_RECORD_SERIES(field, kind, use) {#field, &Rollout::field, SeriesKind::kind, DataUse::use},
#include "espalier/rollout/record_data.def"
  };
  return kRows;
}

std::span<const ScalarRow> scalar_rows() {
  static constexpr ScalarRow kRows[] = {
#define ESPALIER_RECORD_TEXT(field, use) {#field, &Rollout::field, DataUse::use},
#define ESPALIER_RECORD_INTEGER(field, use) {#field, &Rollout::field, DataUse::use},
#define ESPALIER_RECORD_WORD(field, Choice, use) {#field, &Rollout::field, DataUse::use},
#define ESPALIER_RECORD_AMOUNT(field, use) {#field, &Rollout::field, DataUse::use},
#include "espalier/rollout/record_data.def"
  };
  return kRows;
}

const SeriesRow* find_series(std::string_view name) { return find_row(series_rows(), name); }
const ScalarRow* find_scalar(std::string_view name) { return find_row(scalar_rows(), name); }

bool ScalarRow::given(const Rollout& rollout) const {
  return std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), std::string Rollout::*>)
          return !(rollout.*member).empty();
        else
          return (rollout.*member).has_value();
      },
      value);
}

void require_series(std::span<const Rollout> rollouts, const Options& options) {
  for (const NeedRow& need : kNeeds) {
    if (!need.holds(options)) continue;
    const SeriesMember values = find_series(need.field)->values;
    for (const Rollout& rollout : rollouts)
      if ((rollout.*values).empty() && !rollout.response_ids.empty())
        throw InputError(
            {rollout.where,
             text_of("a field ", need.field, ", for --", need.option, " ", option_text(options, need.option)), "none",
             need.remedy});
  }
}

}  // namespace espalier
