#include "tests/unit/report/run_folder.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

namespace espalier::testing {

namespace fs = std::filesystem;

RunFolderOnDisk::RunFolderOnDisk() {
  static int made = 0;
  path_ = fs::temp_directory_path() / ("espalier_report_" + std::to_string(getpid()) + "_" + std::to_string(made++));
  fs::remove_all(path_);
  fs::create_directories(path_);
}

RunFolderOnDisk::~RunFolderOnDisk() { fs::remove_all(path_); }

void RunFolderOnDisk::put(const std::string& name, const std::string& text) const {
  std::ofstream(path_ / name, std::ios::binary) << text;
}

std::string RunFolderOnDisk::get(const std::string& name) const {
  std::ostringstream text;
  text << std::ifstream(path_ / name, std::ios::binary).rdbuf();
  return text.str();
}

std::string whole_run() {
  std::string lines =
      R"({"kind": "warm_start", "step": 1, "loss": 5.625})"
      "\n"
      R"({"kind": "evaluation", "step": 0, "accuracy": 0.125, "reward": 0.1875, "length": 11.25})"
      "\n"
      R"({"kind": "sample", "step": 0, "prompt": "2+2?", "response": "five", "expected": "4", "reward": 0})"
      "\n";
  for (const std::string n : {"1", "2"})
    lines +=
        R"({"kind": "step", "step": )" + n + R"(, "loss": -0.0)" + n + R"(, "pg_loss": 0.05, "grad_norm": 0.7)" + n +
        R"(, "kl_loss": 0.0004, "entropy": 1.37, "aux_loss": 0, "z_loss": 0, "clip_fraction": 0.0625, "lr": 1e-5, )"
        R"("schedule": "phased", "rows": {"logical": 4000, "physical": 1000, "trunk": 700, "wave": 300}, )"
        R"("trunk_forwards": 3, "seconds": {"total": 2, "plan": 0.25, "counting": 0, "trunk_forward": 0.5, )"
        R"("waves": 0.5, "trunk_backward": 0.25, "optimizer": 0.25, "generate": 3, "score": 1, "update": 2}, )"
        R"("peak_bytes": {"A": 1048576, "B": 3145728, "C": 2097152}, "predicted": {"seconds": 1.125, )"
        R"("peak_bytes": {"A": 1048576, "B": 4194304, "C": 2097152}}, "reward": 0.3125, "accuracy": 0.4375, )"
        R"("length": {"mean": 13.5, "max": 17}, "groups_dropped": 0, "tokens_saved": 3000})"
        "\n";
  return lines + R"({"kind": "evaluation", "step": 2, "accuracy": 0.875, "reward": 0.9375, "length": 12.25})"
                 "\n"
                 R"({"kind": "sample", "step": 2, "prompt": "2+2?", "response": "four", "expected": "4", "reward": 1})"
                 "\n";
}

}  // namespace espalier::testing
