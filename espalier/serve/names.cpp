#include "espalier/serve/names.h"

#include <algorithm>
#include <array>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

constexpr std::string_view kScheme = "tinker://";
constexpr std::array kKinds{CheckpointKind::training, CheckpointKind::sampler, CheckpointKind::external};

[[noreturn]] void refuse(const std::string& path) {
  throw InputError({"a checkpoint's path",
                    "tinker://RUN/weights/NAME, .../sampler_weights/NAME or .../external_weights/NAME",
                    '"' + path + '"', ""});
}

bool is_plain(std::string_view text, std::string_view more, std::size_t most) {
  return !text.empty() && text.size() <= most && text != "." && text != ".." && std::ranges::all_of(text, [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || more.find(c) != more.npos;
  });
}

}  // namespace

const char* folder_of(CheckpointKind kind) {
  switch (kind) {
    case CheckpointKind::training:
      return "weights";
    case CheckpointKind::sampler:
      return "sampler_weights";
    case CheckpointKind::external:
      return "external_weights";
  }
  return "";
}

const char* type_name_of(CheckpointKind kind) {
  switch (kind) {
    case CheckpointKind::training:
      return "training";
    case CheckpointKind::sampler:
      return "sampler";
    case CheckpointKind::external:
      return "external";
  }
  return "";
}

std::string CheckpointName::path() const { return text_of(kScheme, run, '/', folder_of(kind), '/', name); }
std::string CheckpointName::id() const { return text_of(folder_of(kind), '/', name); }

void require_plain_name(const std::string& name, const char* where) {
  if (!is_plain(name, "._-", 128))
    throw InputError(
        {where, "letters, digits, '.', '_' and '-', at most 128 of them", '"' + name.substr(0, 160) + '"', ""});
}

CheckpointName checkpoint_name(const std::string& run, const std::string& folder, const std::string& name) {
  const auto kind = std::ranges::find_if(kKinds, [&](CheckpointKind one) { return folder == folder_of(one); });
  if (kind == kKinds.end() || !is_plain(run, "._-:", 128) || !is_plain(name, "._-", 128))
    refuse(text_of(kScheme, run, '/', folder, '/', name));
  return {run, *kind, name};
}

CheckpointName checkpoint_name(const std::string& path) {
  if (!path.starts_with(kScheme)) refuse(path);
  const std::string rest = path.substr(kScheme.size());
  const std::size_t first = rest.find('/');
  const std::size_t second = first == rest.npos ? rest.npos : rest.find('/', first + 1);
  if (second == rest.npos) refuse(path);
  return checkpoint_name(rest.substr(0, first), rest.substr(first + 1, second - first - 1), rest.substr(second + 1));
}

}  // namespace espalier::serve
