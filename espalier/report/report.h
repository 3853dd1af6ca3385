// A run's folder to one HTML file.
#pragma once

#include <filesystem>

namespace espalier {

struct ReportFiles {
  std::filesystem::path page;
  std::filesystem::path events;  // empty: the folder has event files already
};

// Writes the page to `out`, by default `folder`/report.html: complete, or as it was before. Where `folder` has no
// TensorBoard event file (train --json writes none), one with the same numbers is written beside the page.
// Errors: InputError for what read_run refuses; OptionError for a place that cannot be written.
ReportFiles write_report(const std::filesystem::path& folder, const std::filesystem::path& out);

}  // namespace espalier
