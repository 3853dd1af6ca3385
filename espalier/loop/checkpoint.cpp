#include "espalier/loop/checkpoint.h"

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/config/model_config.h"
#include "espalier/options/options_json.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

constexpr const char* kCritic = "critic";

}  // namespace

void save_checkpoint(const std::filesystem::path& directory, const LoopState& state, const ModelState& model,
                     const AdamW& optimizer, Critic* critic, const Options& options) {
  RunState out;
  out.mini_batch = state.batches;
  out.random_state = std::to_string(options.seed);
  out.options = options_to_json(options, 'l').dump();
  out.extra = Json{{"metrics_bytes", state.metrics_bytes},
                   {"accuracy", state.accuracy ? Json(*state.accuracy) : Json()},
                   {"prompts_drawn", state.prompts_drawn},
                   {"prompts", state.prompts}}
                  .dump();
  std::optional<AtomicDirectory> target;
  if (model.mesh.writes()) target.emplace(directory);
  const std::filesystem::path folder = target ? target->path() : std::filesystem::path();
  save_trained_model(folder, model, optimizer, out, options.save_dtype);
  if (critic) save_trained_model(folder / kCritic, critic->model(), critic->optimizer(), out, options.save_dtype);
  if (target) target->commit();
  model.mesh.world.wait_for_all();
}

Restored load_checkpoint(const std::filesystem::path& directory, const Options& options, const Mesh& mesh) {
  Restored out;
  if (const TrainedChoice choice = trained_choice(options); choice.added.exist()) {
    NoProgress silent;
    out.model = load_model(options.model, options.dtype, silent, mesh, choice);
  } else if (options.train != "all") {
    NoProgress silent;  // a part of what is shown
    out.model = load_model(directory, options.dtype, silent, mesh, trained_choice(options));
  } else {
    out.model = std::make_unique<ModelState>(local_shape(read_model_shape(directory), mesh), options.dtype,
                                             bound_device(), mesh);
    out.model->source = directory;
    out.model->decoder.device().operations().zero(out.model->weights);
  }
  out.optimizer = std::make_unique<AdamW>(out.model->table, out.model->weights, AdamWSettings::from(options),
                                          out.model->decoder.device(), OptimizerRanks{.world = mesh.world});
  const RunState former = continue_trained_model(directory, *out.model, *out.optimizer);
  const Json extra = Json::parse(former.extra);
  if (!extra.contains("metrics_bytes"))
    throw InputError({(directory / "espalier" / "state.json").string(), "a checkpoint of grpo", "one of train",
                      "continue it with espalier train --resume"});
  out.note = other_sum_order(former, *out.model);
  out.state = {former.step,
               former.mini_batch,
               extra["metrics_bytes"].get<std::int64_t>(),
               extra.value("prompts_drawn", std::int64_t{0}),
               std::nullopt,
               extra.value("prompts", "")};
  if (extra.contains("accuracy") && extra["accuracy"].is_number()) out.state.accuracy = extra["accuracy"].get<double>();
  return out;
}

void restore_critic(const std::filesystem::path& directory, Critic& critic) {
  continue_trained_model(directory / kCritic, critic.model(), critic.optimizer());
}

}  // namespace espalier
