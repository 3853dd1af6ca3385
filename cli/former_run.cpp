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
  const std::string_view section = row.section, name = row.name;
  for (const char* own : {"steps", "threads", "device", "record-every", "profile", "overwrite"})
    if (name == own) return false;
  return !row.is_path() && section != "Parallel degrees";
}

std::string quoted_for_shell(const std::string& word) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=./,:@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

}  // namespace

void apply_former_run(Options& options, const std::string& directory) {
  const std::filesystem::path file = std::filesystem::path(directory) / "espalier" / "state.json";
  std::error_code absent;
  if (!std::filesystem::is_regular_file(file, absent)) return;
  const Json state = read_json_object(file);
  const auto told = state.find("options");
  if (told == state.end() || !told->is_object())
    throw InputError({file.string(), "the member \"options\"", "none", "continue from another checkpoint"});
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

std::string continuing_command(char verb, const std::vector<OptionSetting>& told, const std::string& config,
                               const std::string& directory) {
  std::string out = verb == 'l' ? "espalier grpo" : "espalier train";
  out += " --resume " + quoted_for_shell(directory);
  if (verb == 'l') return out;  // run.json has everything
  if (!config.empty()) out += " --config " + quoted_for_shell(config);
  for (const OptionSetting& setting : told) {
    const OptionRow* row = find_option(setting.name);
    if (!row || continued(*row)) continue;
    bool replaced = false;  // what the former run wrote is not written over with the rest alone
    for (const char* other : {"model", "critic", "resume", "overwrite", "record", "record-every", "rollout-metrics"})
      replaced = replaced || row->name == std::string_view(other);
    if (replaced) continue;
    out += std::string(" --") + row->name;
    if (row->type == OptionType::flag) continue;
    for (const std::string& word : split_paths(setting.value)) out += ' ' + quoted_for_shell(word);
  }
  return out;
}

}  // namespace espalier::cli
