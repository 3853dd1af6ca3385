// The files of a run, read for its report. Their list: docs/run_folder.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/report/plan_picture.h"

namespace espalier {

struct RunRecord {
  std::string name;                                           // of the folder
  Json about;                                                 // run.json; of `train --json` everything but the steps
  std::vector<Json> warm_start, steps, evaluations, samples;  // lines of metrics.jsonl by kind, as they stand there
  std::optional<PlanPicture> picture;                         // the last one
  std::int64_t picture_step = 0;
  std::vector<std::string> notes;  // what a reader should know of the files
};

// Where a run's metrics lie: its folder, or `espalier/` in it, for a model that train wrote.
std::filesystem::path metrics_folder(const std::filesystem::path& folder);

// Reads run.json and metrics.jsonl of that folder, or train.json alone (the output of `train --json`). A last line
// without its end is left out with a note. Errors: InputError with file, line and remedy: neither is there, no steps,
// damaged lines.
RunRecord read_run(const std::filesystem::path& folder);

// The number at a JSON pointer of `line` ("/seconds/total"); none where it is absent, null, no number, or so large that
// sums of such numbers would not be finite.
std::optional<double> number_at(const Json& line, const std::string& field);

using Points = std::vector<std::pair<double, double>>;  // (step, value), finite
Points points_of(const std::vector<Json>& lines, const std::string& field);

}  // namespace espalier
