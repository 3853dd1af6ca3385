#include "espalier/hosting/host.h"

#include <ATen/Parallel.h>
#include <signal.h>

#include <fstream>
#include <set>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/hosting/base_identity.h"
#include "espalier/metrics/timer.h"
#include "espalier/state/planning.h"

namespace espalier {

namespace fs = std::filesystem;

namespace {

// Complete or absent.
void write_state(TunedModel& model, const fs::path& folder, serve::CheckpointKind kind, const std::string& description,
                 const serve::Pause& pause = {}) {
  fs::create_directories(folder.parent_path());
  AtomicDirectory directory(folder);
  model.write(directory.path(), kind == serve::CheckpointKind::training, pause);
  OutputFile file(directory.path() / serve::kDescription);
  file.write(description);
  file.close_synced();
  directory.commit();
}

// Plans depend on the bytes that they may use, and measured memory is never quite the same: a restarted server takes
// the former one's bytes, so that repeated work has the same bits. Not if another budget is given, nor if they
// are more than an eighth above what there is now.
std::int64_t same_as_before(std::int64_t left, const Options& options, Progress& progress) {
  const fs::path file = fs::path(options.state) / "memory";
  const std::string budget = options.memory_budget.empty() ? "automatic" : options.memory_budget;
  std::ifstream in(file);
  std::string budget_before;
  std::int64_t before = 0;
  if (in >> budget_before >> before && budget_before == budget && before > 0) {
    if (before <= left + left / 8) return before;
    progress.note(text_of("there are ", format_bytes(left), " beside the weights, where the former server had ",
                          format_bytes(before), ": calls that run again may differ in their last bits"));
  }
  std::error_code refused;
  fs::create_directories(file.parent_path(), refused);
  if (refused) return left;  // the service, which needs the folder, says so
  AtomicFile out(file);
  out.write(text_of(budget, ' ', left, '\n'));
  out.commit();
  return left;
}

}  // namespace

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
  const std::int64_t held_before = bound_device().held_bytes(), budget = budget_of(options).beside_held();
  for (const auto& [name, folder] : models) {
    Options own = options;
    own.model = folder.string();
    auto base = std::make_unique<HostedBase>(name, folder, own, progress);
    const ModelShape& shape = base->model().shape;
    facts_.push_back({name, fs::absolute(folder).string(), identity_of(shape, folder), shape.architecture,
                      shape.vocabulary, shape.max_positions});
    bases_.emplace(name, std::move(base));
  }
  const std::int64_t weights = bound_device().held_bytes() - held_before;
  const std::int64_t left = budget - weights;
  if (left <= 0)
    throw MemoryBudgetError({"--memory-budget", text_of("more than ", format_bytes(weights), ", the weights alone"),
                             format_bytes(budget), ""});
  hosting_ = std::make_unique<Hosting>(options, machine, same_as_before(left, options, progress));
}

void Host::check_checkpoint(const std::string& name, const fs::path& folder, bool optimizer) const {
  const auto found = bases_.find(name);
  if (found == bases_.end())
    throw InputError({"the checkpoint", "one of a base model of this server", name, "start the server with it"});
  espalier::check_checkpoint(*found->second, folder, optimizer);
}

// The number of threads is a property of the thread that starts them. A limit on the size of files is an error of the
// write, not the end of the process.
void Host::begin_thread() {
  at::set_num_threads(static_cast<int>(hosting_->options.threads));
  sigset_t limits;
  sigemptyset(&limits);
  sigaddset(&limits, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &limits, nullptr);
}

void Host::add_run(const std::string& run, HostedBase& base, std::shared_ptr<TunedModel> model) {
  drop(run);
  const serve::TunedPart part = model->part();
  runs_.emplace(run, Run{base, part, std::move(model), ++clock_, {}});
}

void Host::drop(const std::string& name) {
  const auto found = runs_.find(name);
  if (found == runs_.end()) return;
  std::error_code ignored;
  if (!found->second.parked.empty()) fs::remove_all(found->second.parked, ignored);
  runs_.erase(found);
}

TunedModel& Host::run_of(const std::string& name, const serve::Pause& pause) {
  const auto found = runs_.find(name);
  if (found == runs_.end())
    throw InputError(
        {"model " + name, "one that was created", "none: its creation failed", "see the error of create_model"});
  Run& run = found->second;
  run.last_used = ++clock_;
  if (run.live) return *run.live;
  const auto loading = make_room(run.base, run.part, pause);
  run.live = std::make_shared<TunedModel>(run.base, *hosting_, run.part, run.parked, true, pause);
  return *run.live;
}

bool Host::park_idle_run(const serve::Pause& pause) {
  const std::pair<const std::string, Run>* oldest = nullptr;
  for (const auto& entry : runs_)
    if (entry.second.live && entry.second.live->is_idle() &&
        (oldest == nullptr || entry.second.last_used < oldest->second.last_used))
      oldest = &entry;
  if (oldest == nullptr) return false;
  const std::string name = oldest->first;
  const std::shared_ptr<TunedModel> model = oldest->second.live;
  const std::uint64_t last_used = oldest->second.last_used;
  // A name of its own: others may come to park a run of the same name before this one is written.
  const fs::path folder = fs::path(hosting_->options.state) / serve::kParked / text_of(name, '.', ++clock_);
  {
    const struct Parking {
      explicit Parking(std::int64_t& of_all) : sum(of_all) { ++sum; }
      ~Parking() { --sum; }
      std::int64_t& sum;
    } parking(parking_);
    write_state(*model, folder, serve::CheckpointKind::training, "{}", pause);
  }
  const auto found = runs_.find(name);
  std::error_code ignored;
  if (found == runs_.end() || found->second.live != model || found->second.last_used != last_used) {
    fs::remove_all(folder, ignored);
    return true;
  }
  Run& run = found->second;
  if (!run.parked.empty()) fs::remove_all(run.parked, ignored);
  run.parked = folder;
  run.live.reset();
  return true;
}

void Host::create(const std::string& run, const std::string& base, const serve::TunedPart& part,
                  const serve::Pause& pause) {
  HostedBase& own = *bases_.at(base);
  const auto loading = make_room(own, part, pause);
  add_run(run, own, std::make_shared<TunedModel>(own, *hosting_, part, pause));
}

std::vector<serve::TrainingOutcome> Host::forward_backward(const std::string& run,
                                                           const std::vector<const serve::TrainingCall*>& calls,
                                                           const serve::Pause& pause) {
  TunedModel& model = run_of(run, pause);
  if (calls.size() > 1) try {
      return model.forward_backward(calls, pause);
    } catch (const std::exception&) {  // of which call is not known: each by itself
    }
  std::vector<serve::TrainingOutcome> outcomes;
  for (const serve::TrainingCall* call : calls) {
    try {
      outcomes.push_back(std::move(model.forward_backward({call}, pause).front()));
    } catch (const std::exception& error) {
      if (call->backward) model.break_gradient(error.what());
      outcomes.push_back({{}, std::current_exception()});
    }
  }
  return outcomes;
}

void Host::break_gradient(const std::string& run, const std::string& why, const serve::Pause& pause) {
  run_of(run, pause).break_gradient(why);
}

// A parked run has none.
bool Host::has_gradient(const std::string& name) const {
  const auto found = runs_.find(name);
  return found != runs_.end() && found->second.live && found->second.live->has_gradient();
}

std::map<std::string, double> Host::optim_step(const std::string& run, const serve::AdamParams& params,
                                               const serve::Pause& pause) {
  TunedModel& model = run_of(run, pause);
  const AdamW::Update update = model.step(params, pause);
  return {{"grad_norm:mean", update.grad_norm}, {"step:max", static_cast<double>(model.optimizer().steps_done())}};
}

void Host::save(const std::string& run, const fs::path& folder, serve::CheckpointKind kind,
                const std::string& description, const serve::Pause& pause) {
  write_state(run_of(run, pause), folder, kind, description, pause);
}

void Host::load(const std::string& run, const std::string& base, const serve::TunedPart& part, const fs::path& folder,
                bool optimizer, const serve::Pause& pause) {
  check_checkpoint(base, folder, optimizer);
  drop(run);
  HostedBase& own = *bases_.at(base);
  const auto loading = make_room(own, part, pause);
  add_run(run, own, std::make_shared<TunedModel>(own, *hosting_, part, folder, optimizer, pause));
}

std::int64_t Host::tuned_bytes() const {
  std::int64_t sum = loading_bytes_;
  for (const auto& [name, run] : runs_) sum += run.live ? run.live->held_bytes() : 0;
  for (const auto& [name, sampler] : samplers_)
    if (sampler.live) sum += sampler.live->weight_bytes();
  return sum;
}

// The one that was used the longest ago; it is read again when somebody asks for it.
bool Host::drop_idle_sampler() {
  Sampler* oldest = nullptr;
  for (auto& [name, sampler] : samplers_)
    if (sampler.live && sampler.live->idle() && sampler.live->weight_bytes() > 0 && sampler.source.folder &&
        (oldest == nullptr || sampler.last_used < oldest->last_used))
      oldest = &sampler;
  if (oldest == nullptr) return false;
  oldest->live.reset();
  return true;
}

std::unique_ptr<Host::Loading> Host::make_room(const HostedBase& base, const serve::TunedPart& part,
                                               const serve::Pause& pause) {
  const std::int64_t needed = TunedModel::bytes_of(base, part);
  auto loading = std::make_unique<Loading>(loading_bytes_, needed);
  while (tuned_bytes() > hosting_->tuned_bytes) {
    if (drop_idle_sampler() || park_idle_run(pause)) continue;
    if (parking_ > 0) {  // by a request that has its turn again after this one's pause
      pause();
      continue;
    }
    const std::int64_t taken = tuned_bytes() - needed;
    throw MemoryBudgetError(
        {"the tuned model",
         text_of("one that fits the ", format_bytes(hosting_->tuned_bytes),
                 " which this server keeps for tuned models, of which ", format_bytes(taken), " are taken"),
         text_of("one of rank ", part.rank, " that needs ", format_bytes(needed)),
         text_of(
             "take a smaller rank, end other sessions, or start the server with a --memory-budget that is larger by ",
             format_bytes(4 * (taken + needed - hosting_->tuned_bytes)))});
  }
  return loading;
}

void Host::open_sampler(const std::string& name, const serve::SamplerSource& source, const serve::Pause& pause) {
  TunedModel* const model = source.run ? &run_of(*source.run, pause) : nullptr;
  Sampler& sampler = samplers_[name];
  if (sampler.live)
    sampler.live->fail(std::make_exception_ptr(InputError({"", "", "the sampler was opened again", ""})));
  sampler = {source, nullptr, ++clock_, nullptr};
  if (model == nullptr) return;  // read when it is first used
  HostedBase& base = *bases_.at(source.base);
  auto weights = snapshot_of(model->model());
  weights->decoder.share_positions(base.decoder());
  sampler.live = std::make_unique<HostedSampler>(base, *hosting_, std::move(weights));
  while (tuned_bytes() > hosting_->tuned_bytes && drop_idle_sampler()) {
  }
}

HostedSampler& Host::live(Sampler& sampler, const serve::Pause& pause) {
  sampler.last_used = ++clock_;
  if (sampler.failed) std::rethrow_exception(sampler.failed);
  if (sampler.live) return *sampler.live;
  const auto found = bases_.find(sampler.source.base);
  if (found == bases_.end())
    throw InputError({"the sampler", "a base model of this server", sampler.source.base, "start the server with it"});
  HostedBase& base = *found->second;
  std::unique_ptr<ModelState> weights;
  if (sampler.source.folder) {
    weights = load_tuned(base, sampler.source.part, *sampler.source.folder, pause);
    weights->decoder.share_positions(base.decoder());
  }
  while (weights && tuned_bytes() + static_cast<std::int64_t>(weights->weights.nbytes()) > hosting_->tuned_bytes &&
         drop_idle_sampler()) {
  }
  sampler.live = std::make_unique<HostedSampler>(base, *hosting_, std::move(weights));
  return *sampler.live;
}

void Host::fail_sampler(const std::string& sampler, std::exception_ptr error) { samplers_[sampler].failed = error; }

void Host::close_sampler(const std::string& name) {
  const auto found = samplers_.find(name);
  if (found == samplers_.end()) return;
  if (found->second.live)
    found->second.live->fail(std::make_exception_ptr(InputError({"", "", "the sampler was closed", ""})));
  samplers_.erase(found);
}

void Host::add_sample(const std::string& name, std::int64_t ticket, const serve::SampleCall& call,
                      serve::SampleDone done, const serve::Pause& pause) {
  const auto found = samplers_.find(name);
  if (found == samplers_.end())
    throw InputError({"sampler " + name, "one that was opened", "none", "create another sampling client"});
  live(found->second, pause).add(ticket, call, std::move(done));
}

void Host::cancel_sample(std::int64_t ticket) {
  for (const auto& [name, sampler] : samplers_)
    if (sampler.live && sampler.live->cancel(ticket)) return;
}

std::int64_t Host::kv_bytes_of(const HostedSampler& sampler) const {
  std::int64_t left = hosting_->kv_bytes;
  for (const auto& [name, other] : samplers_)
    if (other.live && other.live.get() != &sampler) left -= other.live->held_bytes();
  return left;
}

// Where memory was moved for them, tokens follow each other until the time of their turn is over.
bool Host::step_samples() {
  decoding_ends_ = 0;
  bool more = step_all_samplers();
  while (more && Timer::steady_seconds() < decoding_ends_) more = step_all_samplers();
  return more;
}

bool Host::step_all_samplers() {
  bool more = false;
  std::set<HostedBase*> sampling;
  for (const auto& [name, each] : samplers_) {
    if (!each.live || each.live->idle()) continue;
    HostedSampler& sampler = *each.live;
    if (sampling.empty()) {
      const std::optional<double> seconds = hosting_->calls.begin_decoding();
      if (!seconds) return true;  // after a call that has the memory now
      if (*seconds > 0) decoding_ends_ = Timer::steady_seconds() + *seconds;
    }
    sampling.insert(&sampler.base());
    try {
      sampler.base().hold_weights(true);
    } catch (...) {
      sampler.fail(std::current_exception());
      continue;
    }
    if (kv_bytes_of(sampler) < hosting_->kv_bytes / 2)
      for (const auto& [other_name, other] : samplers_)
        if (other.live) other.live->forget();
    sampler.set_kv_bytes(kv_bytes_of(sampler));
    sampler.step();
    more = more || !sampler.idle();
  }
  for (const auto& [name, base] : bases_)
    if (!sampling.contains(base.get())) base->hold_weights(false);
  return more;
}

}  // namespace espalier
