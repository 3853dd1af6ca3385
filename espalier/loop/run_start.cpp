#include "espalier/loop/run_start.h"

#include <algorithm>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/config/model_config.h"
#include "espalier/device/device.h"
#include "espalier/generate/generate_records.h"
#include "espalier/loop/built_in_tasks.h"
#include "espalier/loop/sampling.h"
#include "espalier/loop/teacher.h"
#include "espalier/measure/machine.h"
#include "espalier/options/options_json.h"
#include "espalier/options/products.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/train/train_record.h"
#include "espalier/train/trained_model.h"

namespace espalier {
namespace {

std::filesystem::path root_of(const Options& options) {
  if (options.resume.empty()) return options.out;
  if (!options.out.empty() && options.out != options.resume)
    throw OptionError({"--out", "the folder of --resume, or no --out", options.out, "leave --out out"});
  if (!RunFolder::is_run(options.resume))
    throw InputError(
        {options.resume, "the folder of a run (with run.json)", "none", "give the --out folder of a grpo run"});
  return options.resume;
}

// The directory with config and tokenizer: the newest checkpoint's, or that of the run's first model.
std::filesystem::path source_of(const RunFolder& folder, const Options& options) {
  const auto step = folder.newest_checkpoint();
  return step && !asks_for_additions(options) ? folder.checkpoint(*step) : std::filesystem::path(options.model);
}

ModelShape shape_of(const Options& options, const BuiltInTasks& tasks) {
  if (options.model.empty())
    require_no_additions(options, "without --model, because a fresh model trains all parameters", "give --model");
  if (options.model.empty() && options.train != "all")
    throw OptionError({"--train", "all without --model, because a fresh model trains all parameters",
                       "'" + options.train + "'", "give --model, or leave --train out"});
  if (options.model.empty()) return model_shape_of(tasks.fresh_config(options), "--fresh");
  const ModelShape shape = read_trained_shape(options.model, trained_choice(options));
  if (options.prompts.empty()) tasks.check_words(options.model, shape);
  return shape;
}

RunStart continue_run(const std::filesystem::path& root, const Options& given, const BuiltInTasks& tasks,
                      Progress& progress, const Mesh& mesh) {
  RunStart out;
  out.folder = std::make_unique<RunFolder>(root);
  Json run = out.folder->description();
  const std::string where = (out.folder->root() / "run.json").string();
  const Json recorded = run.value("options", Json::object());
  out.options = continued_options(given, recorded, where);
  out.options.tp = given.tp, out.options.ep = given.ep, out.options.dp = given.dp;  // whatever they were
  choose_products(out.options);
  out.machine = profile_of(run.value("machine", Json::object()).value("profile", Json::object()), where);
  if (const std::int64_t before = recorded.value("threads", out.options.threads); before != out.options.threads)
    progress.note(text_of("threads: ", before, " before, ", out.options.threads, " now; sums may round differently"));
  run["options"] = options_to_json(out.options, 'l');
  // Its own copy of the tokenizer, which the model directory may have lost.
  const std::filesystem::path source = source_of(*out.folder, out.options);
  const ModelShape shape = source != out.options.model ? read_model_shape(source) : shape_of(out.options, tasks);
  out.questions = make_questions(out.options, tasks, source, shape, progress);
  const bool launched_anew = run.value("launch", "") != mesh.run;
  run["launch"] = mesh.run;
  if (launched_anew || run["options"] != recorded) out.folder->write_description(run);
  return out;
}

// A checkpoint and the trained model.
void check_disk_space(const std::filesystem::path& root, const ModelShape& shape, const Options& options) {
  std::int64_t bytes = 2 * bytes_of_saved_model(shape, options.model, options);
  if (const auto critic = trained_critic(options))
    bytes += bytes_of_saved_model(read_critic_shape(*critic), critic->source, options);
  require_disk_space({{root, bytes}});
}

RunStart new_run(const std::filesystem::path& root, const Options& given, const BuiltInTasks& tasks, Progress& progress,
                 const Mesh& mesh) {
  RunStart out;
  out.options = given;
  out.options.overwrite = false;  // it is done once, here
  if (out.options.memory_budget.empty())
    out.options.memory_budget = text_of(budget_of(given, mesh.local_ranks).bytes, "B");
  CheckedRun checked = check_new_run(out.options, tasks, progress, mesh);
  out.questions = std::move(checked.questions);
  out.machine = machine_profile(out.options, progress);
  check_disk_space(root, checked.shape, out.options);
  out.folder = std::make_unique<RunFolder>(root);
  if (given.overwrite) out.folder->clear();
  Json run;
  run["espalier"] = ESPALIER_VERSION;
  run["verb"] = "grpo";
  run["started"] = utc_now();
  run["launch"] = mesh.run;
  run["machine"] = {{"name", out.machine.name}, {"threads", out.options.threads}, {"profile", to_json(out.machine)}};
  run["model"] = shape_json(checked.shape);
  run["options"] = options_to_json(out.options, 'l');
  out.folder->write_description(run);
  return out;
}

}  // namespace

std::vector<HeldModel> models_of_loop(const ModelShape& shape, const Options& options, const Mesh& mesh) {
  const LocalShape local = local_shape(shape, mesh);
  std::vector<HeldModel> held{{local, {}}};
  if (options.kl_loss_coef > 0 && !keeps_own_parameters(shape)) held.push_back({local});
  if (const auto teacher = teacher_shape(options)) held.push_back({local_shape(*teacher, mesh)});
  if (const auto critic = trained_critic(options)) held.push_back({local_shape(read_critic_shape(*critic), mesh), {}});
  return held;
}

CheckedRun check_new_run(const Options& options, const BuiltInTasks& tasks, Progress& progress, const Mesh& mesh) {
  check_sampling(options);
  CheckedRun out;
  out.shape = shape_of(options, tasks);
  require_room(models_of_loop(out.shape, options, mesh), options);
  note_teacher(options, out.shape, progress);
  out.questions = make_questions(options, tasks, options.model, out.shape, progress);
  return out;
}

void require_new_run(const Options& options) {
  if (!options.resume.empty() || options.overwrite || !RunFolder::is_run(options.out)) return;
  // Without a checkpoint nothing has been done that could be lost.
  if (RunFolder(options.out).has_progress())
    throw OptionError(
        {"--out", "a folder without a run", options.out + ", which has one",
         "use --resume " + options.out + " to continue it, --overwrite to replace it, or choose another name"});
}

namespace {

RunStart start_on_disk(const Options& given, const BuiltInTasks& tasks, Progress& progress, const Mesh& mesh) {
  const std::filesystem::path root = root_of(given);
  if (given.overwrite && !given.resume.empty())
    throw OptionError({"--overwrite", "a new run", "--resume, which continues a run", "leave one of the two out"});
  require_new_run(given);
  if (!given.resume.empty()) return continue_run(root, given, tasks, progress, mesh);
  return new_run(root, given, tasks, progress, mesh);
}

// The start that rank 0 has found, as text, and the start that another rank makes of it.
std::string told(const RunStart& start) {
  return Json{{"options", options_to_json(start.options, 'l')},
              {"machine", to_json(start.machine)},
              {"root", start.folder->root().string()}}
      .dump();
}

RunStart start_as_told(const Json& told, const BuiltInTasks& tasks, Progress& progress) {
  RunStart out;
  out.options = options_from_json(told["options"], "rank 0: ");
  choose_products(out.options);
  out.machine = profile_of(told["machine"], "the machine profile of rank 0");
  out.folder = RunFolder::seen_by_rank(told["root"].get<std::string>());
  const std::filesystem::path source = source_of(*out.folder, out.options);
  out.questions =
      make_questions(out.options, tasks, source,
                     source != out.options.model ? read_model_shape(source) : shape_of(out.options, tasks), progress);
  return out;
}

}  // namespace

RunStart start_run(const Options& given, const BuiltInTasks& tasks, Progress& progress, const Mesh& mesh) {
  check_environment(given);
  if (mesh.world.size() == 1) return start_on_disk(given, tasks, progress, mesh);
  RunStart out;
  if (mesh.writes()) out = start_on_disk(given, tasks, progress, mesh);
  const Json of_rank_0 = Json::parse(text_of_rank(mesh.world, mesh.writes() ? told(out) : ""));
  return mesh.writes() ? std::move(out) : start_as_told(of_rank_0, tasks, progress);
}

}  // namespace espalier
