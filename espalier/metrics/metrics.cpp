#include "espalier/metrics/metrics.h"

#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/metrics/metric_tags.h"

namespace espalier {
namespace {

std::int64_t size_of(const std::filesystem::path& file) {
  std::error_code absent;
  const std::uintmax_t size = std::filesystem::file_size(file, absent);
  return absent ? 0 : static_cast<std::int64_t>(size);
}

const std::filesystem::path& cut_to(const std::filesystem::path& file, std::int64_t bytes) {
  if (size_of(file) < bytes)
    throw InputError({file.string(), text_of("the ", bytes, " bytes of the checkpoint"), text_of(size_of(file)),
                      "the file was changed; start a new run"});
  std::error_code failure;
  if (size_of(file) > bytes) std::filesystem::resize_file(file, static_cast<std::uintmax_t>(bytes), failure);
  if (failure) throw OptionError({file.string(), "a file that can be truncated", failure.message(), ""});
  return file;
}

}  // namespace

RunMetrics::RunMetrics(const std::filesystem::path& file, std::int64_t bytes, std::int64_t first_step,
                       MetricLine watcher, bool tensorboard)
    : file_(file), log_(cut_to(file, bytes)), watcher_(std::move(watcher)) {
  if (!tensorboard) return;
  events_.emplace(file.parent_path(), first_step);
  // The warm start counts its own steps: those beyond first_step are not to be replaced.
  std::ifstream written(file);
  for (std::string text; std::getline(written, text);) {
    const Json line = Json::parse(text, nullptr, false);
    if (line.is_object() && line.value("kind", "") == "warm_start" && line.value("step", std::int64_t{0}) >= first_step)
      add_scalars(*events_, line);
  }
}

void RunMetrics::write(const Json& line) {
  log_.write(line);
  if (events_) {
    add_scalars(*events_, line);
    events_->flush();
  }
  if (watcher_) watcher_(line);
}

std::int64_t RunMetrics::bytes() const { return size_of(file_); }

}  // namespace espalier
