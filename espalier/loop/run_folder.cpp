#include "espalier/loop/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <system_error>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/options/options_json.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

// Options that may differ between a run and its continuation.
constexpr std::array<std::string_view, 20> kFree = {"threads",
                                                    "out",
                                                    "resume",
                                                    "steps",
                                                    "save_freq",
                                                    "test_freq",
                                                    "val_size",
                                                    "show",
                                                    "logging_freq",
                                                    "report_to",
                                                    "expect_accuracy",
                                                    "record",
                                                    "overwrite",
                                                    "reward_timeout",
                                                    "tp",
                                                    "cp",
                                                    "pp",
                                                    "ep",
                                                    "dp",
                                                    "comm_timeout"};

bool is_free(std::string_view field) { return std::ranges::find(kFree, field) != kFree.end(); }

// Hidden names are what a run leaves that was killed before its run.json.
bool holds_nothing(const fs::path& folder) {
  std::error_code failure;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, failure))
    if (!entry.path().filename().string().starts_with('.')) return false;
  return true;
}

void check_usable(const fs::path& root) {
  std::error_code failure;
  if (!fs::exists(root, failure)) return;
  if (!fs::is_directory(root, failure))
    throw OptionError({root.string(), "an empty folder, or the folder of a run", "a file", "choose another --out"});
  if (!RunFolder::is_run(root) && !holds_nothing(root))
    throw OptionError({root.string(), "an empty folder, or the folder of a run (with run.json)",
                       "a folder with other content", "choose another --out, or empty it yourself"});
}

}  // namespace

bool RunFolder::is_run(const fs::path& root) {
  std::error_code failure;
  return fs::is_regular_file(root / "run.json", failure);
}

std::unique_ptr<RunFolder> RunFolder::seen_by_rank(const fs::path& root) {
  std::unique_ptr<RunFolder> seen(new RunFolder());
  seen->root_ = root;
  return seen;
}

RunFolder::RunFolder(const fs::path& root) : root_(resolved_target(root)) {
  check_usable(root_);
  std::error_code failure;
  fs::create_directories(root_, failure);
  if (failure) throw_output_error(root_, "create this folder", failure.value());
  check_output_file(root_ / "run.json");
  lock_ = ::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) throw_output_error(root_, "create this folder", errno);
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(lock_);
  throw OptionError({root_.string(), "a run that no other process writes", "one that is being written",
                     "wait for the other process, or choose another --out"});
}

RunFolder::~RunFolder() { ::close(lock_); }

fs::path RunFolder::checkpoint(std::int64_t step) const {
  char name[64];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step));
  return root_ / "checkpoints" / name;
}

std::optional<std::int64_t> RunFolder::newest_checkpoint() const {
  std::optional<std::int64_t> newest;
  std::error_code absent;
  for (const fs::directory_entry& entry : fs::directory_iterator(root_ / "checkpoints", absent)) {
    long long step = 0;
    if (std::sscanf(entry.path().filename().c_str(), "step-%lld", &step) != 1 || !is_espalier_output(entry.path()))
      continue;
    newest = std::max<std::int64_t>(newest.value_or(step), step);
  }
  return newest;
}

void RunFolder::clear() const {
  // run.json goes last, since it makes the folder a run: a clear that is killed leaves a run without checkpoints.
  std::error_code ignored;
  for (const fs::path& part : {root_ / "checkpoints", model(), fresh(), last_rollouts(), metrics()})
    fs::remove_all(part, ignored);
  for (const fs::directory_entry& entry : fs::directory_iterator(root_, ignored))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) fs::remove(entry.path(), ignored);
  fs::remove(root_ / "run.json", ignored);
}

bool RunFolder::has_progress() const { return newest_checkpoint().has_value() || is_espalier_output(warm_start()); }

void RunFolder::write_description(const Json& run) const {
  AtomicFile file(root_ / "run.json");
  file.write(run.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  file.commit();
}

Json RunFolder::description() const { return read_json_object(root_ / "run.json"); }

Options continued_options(const Options& given, const Json& recorded, const std::string& where) {
  Options options = options_from_json(recorded, where);
  options.record = given.record;  // a trace is of one start
  const Options defaults = default_options('l');
  for (const OptionRow& row : option_rows()) {
    if (!row.taken_by('l')) continue;
    const std::string now = option_text(given, row.name), before = option_text(options, row.name);
    if (now == option_text(defaults, row.name) || now == before) continue;
    if (!is_free(row.field))
      throw OptionError({std::string("--") + row.name, before + ", the value of the run in " + where, now,
                         "leave the option out to continue, or start a new run in another --out"});
    set_option(options, row.name, now);
  }
  return options;
}

}  // namespace espalier
