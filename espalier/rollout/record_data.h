// The rows of record_data.def as data.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

enum class DataUse { update, told };
enum class SeriesKind { logprob, sampled, number };

using SeriesMember = std::vector<double> Rollout::*;

struct SeriesRow {
  std::string_view name;
  SeriesMember values;
  SeriesKind kind;
  DataUse use;

  bool is_logprob() const { return kind != SeriesKind::number; }
};
std::span<const SeriesRow> series_rows();
// Null: there is no such series.
const SeriesRow* find_series(std::string_view name);

// A field with one value for the whole rollout.
struct ScalarRow {
  std::string_view name;
  std::variant<std::string Rollout::*, std::optional<std::int64_t> Rollout::*, std::optional<LossUnit> Rollout::*,
               std::optional<double> Rollout::*>
      value;
  DataUse use;

  bool is_amount() const { return std::holds_alternative<std::optional<double> Rollout::*>(value); }
  bool given(const Rollout& rollout) const;
};
std::span<const ScalarRow> scalar_rows();
const ScalarRow* find_scalar(std::string_view name);

// Errors: InputError, naming option and record, for a rollout without a series that one of the options needs.
void require_series(std::span<const Rollout> rollouts, const Options& options);

}  // namespace espalier
