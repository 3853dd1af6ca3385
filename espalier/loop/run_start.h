// How a run begins or continues: its folder, its final options, and the machine it plans for.
#pragma once

#include <memory>

#include "espalier/loop/run_folder.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/model_shape.h"

namespace espalier {

struct RunStart {
  std::unique_ptr<RunFolder> folder;
  Options options;         // with a memory budget, so that plans do not depend on what is free at the moment
  MachineProfile machine;  // of the first start, for the same reason
};

// Opens --resume, or --out; writes run.json where it is new or its options have changed.
// Errors: OptionError, InputError, UnsupportedError; nothing has been written then.
RunStart start_run(const Options& given, Progress& progress);

}  // namespace espalier
