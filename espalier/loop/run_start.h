// How a run begins or continues: its folder, its final options, its questions, and the machine it plans for.
#pragma once

#include <memory>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/loop/questions.h"
#include "espalier/loop/run_folder.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/shape/model_shape.h"
#include "espalier/state/held_models.h"

namespace espalier {

struct RunStart {
  std::unique_ptr<RunFolder> folder;
  Options options;         // with a memory budget, so that plans do not depend on what is free at the moment
  MachineProfile machine;  // of the first start, for the same reason
  std::unique_ptr<Questions> questions;
};

// The models that a run holds from its first batch on: the trained model; a reference if there is a KL term, unless
// its own parameters do not train; a teacher; a critic.
std::vector<HeldModel> models_of_loop(const ModelShape& shape, const Options& options,
                                      const Mesh& mesh = mesh_of_one());

// The checks of a new run before it writes anything: options, model, room, prompts, reward.
// Errors: OptionError, InputError, UnsupportedError, MemoryBudgetError.
struct CheckedRun {
  ModelShape shape;
  std::unique_ptr<Questions> questions;
};
CheckedRun check_new_run(const Options& options, const BuiltInTasks& tasks, Progress& progress,
                         const Mesh& mesh = mesh_of_one());

// Errors: OptionError if --out holds a run with a checkpoint or an interrupted warm start, and neither --resume nor
// --overwrite is given.
void require_new_run(const Options& options);

// Opens --resume, or --out; writes run.json where it is new or its options have changed. Rank 0 does this and
// sends the result to the others. Errors: OptionError, InputError, UnsupportedError; nothing has been written
// then.
RunStart start_run(const Options& given, const BuiltInTasks& tasks, Progress& progress,
                   const Mesh& mesh = mesh_of_one());

}  // namespace espalier
