#include "cli/path_check.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <sstream>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/atomic_output.h"

namespace espalier::cli {
namespace fs = std::filesystem;
namespace {

struct NamedPath {
  std::string name, path;  // "--out", "rollouts.jsonl"
  PathRole role = PathRole::input;
  bool exists = false;
  struct stat status {};
  fs::path real;  // absolute, links resolved as far as it exists

  bool is_folder() const { return exists && S_ISDIR(status.st_mode); }
  bool is_file() const { return exists && S_ISREG(status.st_mode); }
  bool is_output_file() const { return role == PathRole::output_file || role == PathRole::output_records; }
  bool is_output() const { return role != PathRole::input; }
  bool is_output_folder() const { return role == PathRole::output_folder || role == PathRole::output_run; }
};

NamedPath named_path(const std::string& name, const std::string& path, PathRole role) {
  NamedPath out;
  out.name = name, out.path = path, out.role = role;
  const bool standard_input = path == "-" && role == PathRole::input;
  out.exists = (standard_input ? ::fstat(STDIN_FILENO, &out.status) : ::stat(path.c_str(), &out.status)) == 0;
  std::error_code failure;
  if (!standard_input) out.real = fs::weakly_canonical(fs::absolute(path), failure);
  if (!out.real.has_filename()) out.real = out.real.parent_path();
  return out;
}

std::vector<NamedPath> named_paths(const Verb& verb, const Options& options, const std::vector<std::string>& arguments,
                                   const std::string& config) {
  std::vector<NamedPath> out;
  for (const OptionRow& row : option_rows()) {
    const PathRole role = row.taken_by(verb.letter) ? path_role(row, verb.letter) : PathRole::none;
    if (role == PathRole::none) continue;
    for (const std::string& path : split_paths(option_text(options, row.name))) {
      const bool named = role == PathRole::models;
      const std::size_t sign = named ? path.find('=') : path.npos;
      out.push_back(named_path(std::string("--") + row.name, sign == path.npos ? path : path.substr(sign + 1),
                               named ? PathRole::input : role));
    }
  }
  std::istringstream usage(verb.arguments);
  std::string word;  // the last one stands for all that follow
  for (const std::string& argument : arguments) {
    usage >> word;
    if (argument.empty()) continue;  // refused where it is opened
    out.push_back(named_path(word, argument, word == "OUT" ? PathRole::output_records : PathRole::input));
  }
  if (!config.empty()) out.push_back(named_path("--config", config, PathRole::input));
  return out;
}

bool same(const NamedPath& a, const NamedPath& b) {
  if (a.exists && b.exists) return a.status.st_dev == b.status.st_dev && a.status.st_ino == b.status.st_ino;
  return a.exists == b.exists && !a.real.empty() && a.real == b.real;
}

bool lies_in(const NamedPath& inner, const NamedPath& outer) {
  const auto [end, rest] = std::mismatch(outer.real.begin(), outer.real.end(), inner.real.begin(), inner.real.end());
  return !outer.real.empty() && end == outer.real.end() && rest != inner.real.end();
}

// A page may be written again into the folder of its run: no verb reads pages.
bool is_file_of(const NamedPath& file, const NamedPath& folder) {
  if (!file.is_file() || !folder.is_folder() || file.real.extension() == ".html") return false;
  std::error_code failure;
  for (fs::recursive_directory_iterator entry(folder.real, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    struct stat status {};
    if (::stat(entry->path().c_str(), &status) == 0 && status.st_dev == file.status.st_dev &&
        status.st_ino == file.status.st_ino)
      return true;
  }
  return false;
}

bool holds_something(const NamedPath& folder) {
  std::error_code failure;
  return folder.is_folder() && !fs::is_empty(folder.real, failure);
}

[[noreturn]] void refuse(const NamedPath& output, const std::string& expected, const std::string& why) {
  throw OptionError({output.name, expected, '"' + output.path + '"', why});
}

void check_against_input(const NamedPath& output, const NamedPath& input, bool in_place) {
  if (in_place && same(output, input) && input.name != "--rollouts") return;  // replaced by its own continuation
  const std::string kind = output.is_output_file() ? "a file other than " : "a folder other than ";
  if (same(output, input))
    refuse(output, kind + input.name, "an output may not alias an input: the original would be lost");
  const bool replaced =
      output.role == PathRole::output_folder || (output.role == PathRole::output_run && input.is_folder());
  if (replaced && lies_in(input, output))
    refuse(output, "a folder that does not contain " + input.name, "it would be replaced together with " + input.path);
  if (output.is_output_folder() && holds_something(output) && input.is_folder() && lies_in(output, input))
    refuse(output, "a folder outside " + input.name, "it is part of " + input.path + " and would be replaced");
  if (output.is_output_file() && is_file_of(output, input))
    refuse(output, kind + "those in " + input.name, "it is part of " + input.path + " and would be replaced");
}

void check_against_output(const NamedPath& output, const NamedPath& other) {
  if (same(output, other)) refuse(output, "a path other than " + other.name, "one would replace the other");
  if (other.role == PathRole::output_folder && lies_in(output, other))
    refuse(output, "a path outside " + other.name, "that folder is replaced as a whole: choose a path beside it");
}

// A file of records is the work of hours. An empty one, as mktemp makes it, holds nothing.
void check_replaceable(const NamedPath& output, bool overwrite) {
  if (output.role == PathRole::output_records && output.is_file() && output.status.st_size > 0 && !overwrite)
    refuse(output, "a file that does not exist yet",
           "it exists: use --overwrite to replace it, or choose another name");
}

void check_writable(const NamedPath& output) {
  const bool special = output.exists && !output.is_folder() && !output.is_file();  // a pipe, a device
  if (special && ::access(output.path.c_str(), W_OK) != 0) throw_output_error(output.path, "write this file", errno);
  if (special) return;
  switch (output.role) {
    case PathRole::output_file:
    case PathRole::output_records:
      return check_output_file(output.path);
    case PathRole::output_folder:
      return check_output_directory(output.path);
    case PathRole::output_run:  // the run's own lock is there as well, so that looks at it later
    case PathRole::input:
    case PathRole::models:
    case PathRole::none:
      return;
  }
}

}  // namespace

void check_paths(const Verb& verb, const Options& options, const std::vector<std::string>& arguments,
                 const std::string& config) {
  const std::vector<NamedPath> paths = named_paths(verb, options, arguments, config);
  const auto resumed = std::ranges::find(paths, "--resume", &NamedPath::name);
  for (const NamedPath& output : paths) {
    if (!output.is_output() || (output.exists && !output.is_folder() && !output.is_file())) continue;
    const bool in_place = resumed != paths.end() && output.name == "--out" && same(output, *resumed);
    for (const NamedPath& other : paths) {
      if (!other.is_output()) check_against_input(output, other, in_place);
      if (other.is_output() && &other != &output) check_against_output(output, other);
    }
  }
  for (const NamedPath& output : paths) {
    if (!output.is_output()) continue;
    check_replaceable(output, options.overwrite);
    check_writable(output);
  }
}

bool has_output(const Verb& verb, const Options& options, const std::vector<std::string>& arguments) {
  const std::vector<NamedPath> paths = named_paths(verb, options, arguments, "");
  return std::ranges::any_of(paths, &NamedPath::is_output) || verb.letter == 'o' || !options.resume.empty();
}

}  // namespace espalier::cli
