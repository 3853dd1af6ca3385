// The path of one run of a plan, and the keeper of the path's layers that are not in use.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "espalier/model/decoder.h"
#include "espalier/model/open_path.h"
#include "espalier/program/step_plan.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

class StepPath {
 public:
  // Takes the path's rows from the arena. Throws the errors of Store::reserve, before any row runs.
  StepPath(const Decoder& decoder, const StepPlan& plan, bool with_gradients, Arena& arena,
           const std::string& spill_dir);

  OpenPath& operator*() { return *path_; }

 private:
  std::optional<SpillQueue> queue_;
  std::unique_ptr<PathKeeper> keeper_;
  std::optional<OpenPath> path_;
};

}  // namespace espalier
