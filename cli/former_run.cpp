#include "cli/former_run.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/options/options_json.h"

namespace espalier::cli {
namespace {

bool continued(const OptionRow& row) {
  if (!row.taken_by('t')) return false;
  const std::string_view section = row.section, name = row.name, unit = row.unit;
  if (unit == "path" || name == "steps" || name == "threads" || name == "device" || name == "record-every")
    return false;
  return name != "profile" && section != "Parallel degrees";
}

}  // namespace

void apply_former_run(Options& options, const std::string& directory) {
  const std::filesystem::path file = std::filesystem::path(directory) / "espalier" / "state.json";
  std::error_code absent;
  if (!std::filesystem::is_regular_file(file, absent)) return;
  const Json state = read_json_object(file);
  const auto told = state.find("options");
  if (told == state.end() || !told->is_object())
    throw InputError({file.string(), "a member options", "none", "continue from another checkpoint"});
  const Options former = options_from_json(*told, file.string() + ": ");
  for (const OptionRow& row : option_rows())
    if (continued(row)) set_option(options, row.name, option_text(former, row.name));
}

std::string told_by_former_run(const Options& options) {
  const Options defaults;
  std::string out;
  for (const OptionRow& row : option_rows())
    if (continued(row))
      if (const std::string value = option_text(options, row.name); value != option_text(defaults, row.name))
        out += (out.empty() ? "--" : " --") + std::string(row.name) + ' ' + value;
  return out;
}

}  // namespace espalier::cli
