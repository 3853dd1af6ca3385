#include "espalier/report/run_record.h"

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy = "restore the file, or remove the damaged line; see docs/run_folder.md";

void check_step(const Json& line, const std::string& where) {
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  const Json step = line.contains("step") ? line["step"] : Json();
  if (!step.is_number_integer() || step < 0 || step > kMost)
    throw InputError({where, "\"step\", an integer from 0 to 2^50", step.is_null() ? "nothing" : step.dump(), kRemedy});
}

void add_line(Json line, const std::string& where, RunRecord& run, std::int64_t& unknown) {
  if (!line.contains("kind") || !line["kind"].is_string())
    throw InputError({where, "a line with \"kind\"", "an object without it", kRemedy});
  const std::string kind = line["kind"];
  std::vector<Json>* const lines = kind == "step"         ? &run.steps
                                   : kind == "evaluation" ? &run.evaluations
                                   : kind == "sample"     ? &run.samples
                                   : kind == "warm_start" ? &run.warm_start
                                                          : nullptr;
  if (lines || kind == "picture") check_step(line, where);
  if (lines) {
    lines->push_back(std::move(line));
  } else if (kind == "picture") {
    run.picture = read_picture(line.contains("plan") ? line["plan"] : Json(), where);
    run.picture_step = line["step"];
  } else {
    ++unknown;
  }
}

void read_metrics(const fs::path& path, RunRecord& run) {
  const std::string text = read_text_file(path);
  std::int64_t number = 1, unknown = 0;
  for (std::size_t begin = 0; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) {
      run.notes.push_back(text_of("The last line of ", path.filename().string(), " (", number,
                                  ") is incomplete, because the run was stopped while writing it. It is skipped."));
      break;
    }
    const std::string where = text_of(path.string(), ":", number);
    add_line(parse_json_object(text.substr(begin, end - begin), where), where, run, unknown);
    begin = end + 1;
  }
  if (unknown > 0)
    run.notes.push_back(text_of(unknown, " lines of ", path.filename().string(), " have an unknown kind."));
}

void read_train_output(const fs::path& path, RunRecord& run) {
  run.about = read_json_object(path);
  if (!run.about.contains("steps") || !run.about["steps"].is_array())
    throw InputError({path.string(), "\"steps\", as train --json prints them",
                      run.about.contains("error") ? "the report of an error" : "an object without them",
                      "run espalier train ... --json > " + path.string() + " again"});
  for (Json& step : run.about["steps"]) {
    const std::string where = text_of(path.string(), ": step ", run.steps.size() + 1);
    if (!step.is_object()) throw InputError({where, "an object", step.type_name(), kRemedy});
    check_step(step, where);
    step["kind"] = "step";
    run.steps.push_back(std::move(step));
  }
  run.about.erase("steps");
}

std::string name_of_folder(const fs::path& folder) {
  const fs::path whole = fs::absolute(folder).lexically_normal();
  const std::string bytes = (whole.has_filename() ? whole : whole.parent_path()).filename().string();
  // A round trip through JSON replaces what is no UTF-8.
  return Json::parse(Json(bytes).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

}  // namespace

fs::path metrics_folder(const fs::path& folder) {
  std::error_code unreadable;
  const fs::path of_train = folder / "espalier";
  return !fs::exists(folder / "metrics.jsonl", unreadable) && fs::exists(of_train / "metrics.jsonl", unreadable)
             ? of_train
             : folder;
}

RunRecord read_run(const fs::path& folder) {
  RunRecord run;
  run.name = name_of_folder(folder);
  const fs::path home = metrics_folder(folder), metrics = home / "metrics.jsonl", train = folder / "train.json";
  std::error_code unreadable;
  if (fs::exists(metrics, unreadable)) {
    run.about = read_json_object(home / "run.json");
    read_metrics(metrics, run);
  } else if (fs::exists(train, unreadable)) {
    read_train_output(train, run);
  } else {
    throw InputError(
        {folder.string(), "run.json and metrics.jsonl, or train.json",
         fs::is_directory(folder, unreadable) ? "a folder without them" : "no such folder",
         "give the --out of espalier grpo or train, or a folder with train.json (what train --json prints)"});
  }
  if (run.steps.empty() && run.warm_start.empty() && run.evaluations.empty())
    throw InputError({folder.string(), "a run that has made a step", "one without any", "let it run a little longer"});
  return run;
}

std::optional<double> number_at(const Json& line, const std::string& field) {
  const Json::json_pointer pointer(field);
  if (!line.contains(pointer) || !line.at(pointer).is_number()) return {};
  const auto value = line.at(pointer).get<double>();
  constexpr double kLargest = 1e290;
  return std::abs(value) <= kLargest ? std::optional(value) : std::nullopt;
}

Points points_of(const std::vector<Json>& lines, const std::string& field) {
  Points points;
  for (const Json& line : lines)
    if (const auto value = number_at(line, field)) points.emplace_back(line["step"].get<double>(), *value);
  return points;
}

}  // namespace espalier
