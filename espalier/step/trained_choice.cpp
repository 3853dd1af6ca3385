#include "espalier/step/trained_choice.h"

#include <utility>

#include "espalier/base/error.h"
#include "espalier/checkpoint/adapter.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// That every character stands for itself in an expression.
std::string literal(const std::string& name) {
  std::string out;
  for (const char c : name) out += c == '.' ? std::string("[.]") : std::string(1, c);
  return out;
}

TrainedChoice choice_of(const Options& options, const std::string& words, const std::string& directory, bool trains) {
  AdapterChoice adapter;
  adapter.seed = static_cast<std::uint64_t>(options.seed);
  if (directory.empty()) {
    adapter.rank = options.lora_rank, adapter.alpha = options.lora_alpha, adapter.root_of_rank = options.use_rslora;
    adapter.target = options.lora_target;
    return {words, std::move(adapter)};
  }
  const Adapter stored(directory, ParameterTable(read_model_shape(model_source(options))));
  if (trains && stored.dropout() > 0)
    throw UnsupportedError({(fs::path(directory) / "adapter_config.json").string() + ": lora_dropout",
                            "0, because a shared row must be the same in every rollout", text_of(stored.dropout()),
                            "set it to 0 to train without dropout"});
  if (options.lora_rank > 0 && options.lora_rank != stored.rank())
    throw OptionError({"--lora-rank", text_of(stored.rank(), ", that of ", directory), text_of(options.lora_rank),
                       "leave --lora-rank out: the adapter has its own"});
  adapter.rank = stored.rank(), adapter.alpha = stored.alpha(), adapter.root_of_rank = stored.root_of_rank();
  adapter.modules = std::make_shared<const std::set<std::string>>(stored.modules());
  adapter.directory = directory;
  std::string all = words;
  if (words == "all")
    for (const std::string& name : stored.whole()) all += (all == "all" ? (all.clear(), "") : ",") + literal(name);
  return {all, std::move(adapter)};
}

}  // namespace

std::string model_source(const Options& options) {
  if (!options.model.empty() || options.resume.empty() || !is_adapter(options.resume))
    return options.model.empty() ? options.resume : options.model;
  const std::string base = base_named_in(options.resume);
  std::error_code ignored;
  if (base.empty() || !fs::is_directory(base, ignored))
    throw InputError({(fs::path(options.resume) / "adapter_config.json").string() + ": base_model_name_or_path",
                      "the directory of the adapter's model", base.empty() ? "none" : "'" + printable(base) + "'",
                      "name it with --model"});
  return base;
}

TrainedChoice trained_choice(const Options& options) {
  const bool resumes = options.adapter.empty() && !options.resume.empty() && is_adapter(options.resume);
  TrainedChoice choice = choice_of(options, options.train, resumes ? options.resume : options.adapter, true);
  choice.scores = options.objective == ObjectiveKind::reward;
  return choice;
}

TrainedChoice scored_choice(const Options& options, bool takes_reward_models) {
  TrainedChoice choice = options.adapter.empty() ? TrainedChoice() : choice_of(options, "all", options.adapter, false);
  choice.scores = takes_reward_models && is_reward_model(options.model);
  return choice;
}

}  // namespace espalier
