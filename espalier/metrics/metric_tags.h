// The names that the fields of metrics.jsonl have in TensorBoard: verl's where it has one, so that runs of both lie in
// one chart.
#pragma once

#include <functional>
#include <span>

#include "espalier/base/json_fwd.h"
#include "espalier/metrics/event_file.h"

namespace espalier {

struct MetricTag {
  const char* kind;   // of the line: "step", "evaluation", "warm_start"
  const char* field;  // JSON pointer into the line
  const char* tag;
};
std::span<const MetricTag> metric_tags();

// Calls `use` with the tag and value of every number of the table that `line` (an object with "kind") holds.
void for_each_scalar(const Json& line, const std::function<void(const char* tag, double value)>& use);

// Adds every number of the table that `line` (an object with "kind" and "step") holds. Fields that are absent or no
// numbers are passed over. Errors: OptionError of the file.
void add_scalars(EventFile& events, const Json& line);

}  // namespace espalier
