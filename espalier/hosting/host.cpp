#include "espalier/hosting/host.h"

#include <ATen/Parallel.h>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/step/planning.h"

namespace espalier {

std::vector<NamedFolder> named_folders(const std::string& options) {
  std::vector<NamedFolder> out;
  for (const std::string& given : split_paths(options)) {
    const std::size_t sign = given.find('=');
    const std::string name = given.substr(0, sign), folder = sign == given.npos ? given : given.substr(sign + 1);
    if (name.empty() || folder.empty())
      throw OptionError({"--model", "NAME=DIR, or a directory alone", '"' + given + '"', ""});
    for (const NamedFolder& other : out)
      if (other.first == name)
        throw OptionError({"--model", "another name for each model", '"' + name + "\" twice", ""});
    out.emplace_back(name, folder);
  }
  return out;
}

Host::Host(const std::vector<NamedFolder>& models, const Options& options, const MachineProfile& machine,
           Progress& progress) {
  const std::int64_t held_before = bound_device().held_bytes(), budget = arena_limit(options);
  for (const auto& [name, folder] : models) {
    Options own = options;
    own.model = folder.string();
    auto base = std::make_unique<HostedBase>(name, folder, own, progress);
    const ModelShape& shape = base->model().shape;
    facts_.push_back(
        {name, std::filesystem::absolute(folder).string(), shape.architecture, shape.vocabulary, shape.max_positions});
    bases_.emplace(name, std::move(base));
  }
  const std::int64_t weights = bound_device().held_bytes() - held_before;
  const std::int64_t left = budget - weights;
  if (left <= 0)
    throw MemoryBudgetError({"--memory-budget", text_of("more than ", format_bytes(weights), ", the weights alone"),
                             format_bytes(budget), ""});
  hosting_ = std::make_unique<Hosting>(options, machine, left / 2);
}

// The number of threads is a property of the thread that starts them.
void Host::begin_thread() { at::set_num_threads(static_cast<int>(hosting_->options.threads)); }

TunedModel& Host::run_of(const std::string& run) {
  const auto found = runs_.find(run);
  if (found == runs_.end())
    throw InputError(
        {"model " + run, "one that was created", "none: its creation failed", "see the error of create_model"});
  return *found->second;
}

void Host::create(const std::string& run, const std::string& base, const serve::LoraConfig& lora) {
  runs_[run] = std::make_unique<TunedModel>(*bases_.at(base), *hosting_, lora);
}

serve::TrainingAnswer Host::forward_backward(const std::string& run, const serve::TrainingCall& call) {
  return run_of(run).forward_backward(call);
}

void Host::break_gradient(const std::string& run, const std::string& why) { run_of(run).break_gradient(why); }

std::map<std::string, double> Host::optim_step(const std::string& run, const serve::AdamParams& params) {
  TunedModel& model = run_of(run);
  const AdamW::Update update = model.step(params);
  return {{"grad_norm:mean", update.grad_norm}, {"step:max", static_cast<double>(model.optimizer().steps_done())}};
}

}  // namespace espalier
