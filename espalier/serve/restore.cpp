// State that outlives a server: records of sessions, models and samplers, saved states of models, and their way back.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/serve/service.h"

namespace espalier::serve {

namespace fs = std::filesystem;

namespace {

constexpr double kMinute = 60;
// A model's state is saved so seldom that saving takes at most a twentieth of the time, and a restart repeats no more
// than about half a minute.
constexpr double kShareOfSaving = 20, kLeastSeconds = 30;

fs::path journal_file(const fs::path& state) { return state / "service.journal"; }
fs::path states_of(const fs::path& run) { return run / "resume"; }

// The saved states of a run, by the number of the last request in each.
std::vector<std::int64_t> saved_states(const fs::path& run) {
  std::vector<std::int64_t> out;
  std::error_code ignored;
  for (fs::directory_iterator at(states_of(run), ignored), end; at != end; at.increment(ignored)) {
    const std::string name = at->path().filename().string();
    std::int64_t number = 0;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), number);
    if (read.ec == std::errc() && read.ptr == name.data() + name.size() &&
        fs::exists(at->path() / kDescription, ignored))
      out.push_back(number);
  }
  std::ranges::sort(out);
  return out;
}

void remove_folder(const fs::path& folder) {
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

}  // namespace

RunJournal& Service::journal_of(const std::string& run) {
  return run_journals_.try_emplace(run, folder_of_run(run) / "journal", settings_.sync_journal).first->second;
}

void Service::write_down(const Json& record) {
  if (replaying_ || !journal_) return;
  try {
    journal_->append(record.dump(-1, ' ', true, Json::error_handler_t::replace));
  } catch (const Error& error) {
    throw Refused{503, error.what()};
  }
}

void Service::save_state(const std::string& run, std::int64_t number) {
  const double begin = seconds_since_1970();
  double paused = 0;
  const auto pause = [&] {
    const double from = seconds_since_1970();
    pause_of(WorkKind::saving)();
    paused += seconds_since_1970() - from;
  };
  timed(WorkKind::saving, [&] {
    engine_.save(run, states_of(folder_of_run(run)) / std::to_string(number), CheckpointKind::training, "{}", pause);
  });
  ++engine_counts_.states_saved;
  const double end = seconds_since_1970();
  saved_[run] = {end, end - begin - paused, 0};
  server_.post([this, alive = alive_, run, number] {
    if (*alive) untaken_states_[run] = number;
  });
}

void Service::save_state_if_due(const std::string& run, std::int64_t number) {
  if (engine_.has_gradient(run)) return;  // which a state does not hold
  const auto [entry, is_new] = saved_.try_emplace(run, SavedState{seconds_since_1970(), 0, 0});
  SavedState& last = entry->second;
  const bool is_due = settings_.save_freq > 0
                          ? ++last.steps >= settings_.save_freq
                          : seconds_since_1970() - last.at >= std::max(kLeastSeconds, kShareOfSaving * last.seconds);
  if (!is_due) return;
  try {
    save_state(run, number);
  } catch (const Error&) {  // a full disk: the journal still has all that is needed
    last.at = seconds_since_1970();
  }
}

void Service::took_state(const std::string& run, std::int64_t number) {
  RunJournal& journal = journal_of(run);
  journal.begin_next(number);
  journal.prune([&](std::int64_t of) { return is_held(run, of); });
  for (const std::int64_t older : saved_states(folder_of_run(run)))
    if (older < number) remove_folder(states_of(folder_of_run(run)) / std::to_string(older));
}

bool Service::is_held(const std::string& run, std::int64_t number) const {
  return futures_.has(text_of(run, '#', number));
}

// Frees what the session's models and samplers hold. Checkpoints with a name stay.
void Service::end_session(const std::string& id) {
  write_down({{"ended", id}});
  for (const auto& [run_id, run] : runs_.all()) {
    if (run.session != id || run.ended) continue;
    TrainingRun& ended = *runs_.find(run_id);
    ended.ended = true;
    shown_ended_.push_back(run_id);
    if (shown_ended_.size() > RunHistory::kMostEnded) {
      histories_.erase(shown_ended_.front());
      shown_ended_.pop_front();
    }
    for (const auto& [number, early] : std::exchange(ended.early, {})) {
      count_queued(run_id, -early.bytes);
      futures_.finish(ended.future(number), error_result("the session has ended", "user"));
    }
    journal_of(run_id).remove();
    run_journals_.erase(run_id);
    thread_.add(run_id, [this, run_id = run_id, folder = folder_of_run(run_id)] {
      engine_.drop(run_id);
      saved_.erase(run_id);
      remove_folder(states_of(folder));
      remove_folder(folder / "journal");
    });
  }
  std::vector<std::string> samplers;
  for (const auto& [sampler_id, sampler] : samplers_.all())
    if (sampler.session == id) samplers.push_back(sampler_id);
  for (const std::string& sampler : samplers) close_sampler(sampler);
}

void Service::look_after() {
  const double now = seconds_since_1970();
  checkpoints_.remove_expired(now);
  std::vector<std::string> silent;
  for (const auto& [id, session] : sessions_.all())
    if (session.finished.is_null() && now - session.last_heard > kSilentSeconds) silent.push_back(id);
  for (const std::string& id : silent) {
    sessions_.find(id)->finished = "nothing was heard of it for an hour";
    end_session(id);
  }
  for (auto& [run, journal] : run_journals_)
    journal.prune([&, name = run](std::int64_t of) { return is_held(name, of); });
  minute_ = server_.after(kMinute, [this] { look_after(); });
}

bool Service::has_model(const std::string& name) const {
  return std::ranges::find(engine_.models(), name, &BaseModel::name) != engine_.models().end();
}

// Two servers in one folder would write over each other.
void Service::lock_folder() {
  const fs::path file = settings_.state / "lock";
  lock_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0) throw_output_error(file, "open this file", errno);
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0)
    throw OptionError({"--state", "a folder that no other server uses", '"' + settings_.state.string() + '"',
                       "give this server another one"});
}

// Trained parts and requests in the folder belong to the models that it was made with.
void Service::require_same_models() {
  const fs::path file = settings_.state / "models.json";
  Json known = Json::object();
  if (std::ifstream in(file); in) known = Json::parse(in, nullptr, false);
  if (!known.is_object()) known = Json::object();
  for (const BaseModel& model : engine_.models()) {
    if (const Json before = known.value(model.name, Json()); !before.is_null() && before != model.identity)
      throw OptionError({"--model " + model.name, "the model of this name that " + settings_.state.string() + " knows",
                         "another one, in " + model.folder,
                         "give the model another name, or the server another --state"});
    known[model.name] = model.identity;
  }
  AtomicFile out(file);
  out.write(known.dump(2) + "\n");
  out.commit();
}

void Service::restore() {
  std::error_code refused;
  fs::create_directories(settings_.state, refused);
  if (refused) throw_output_error(settings_.state, "create this folder", refused.value());
  lock_folder();
  require_same_models();
  remove_folder(settings_.state / kParked);
  std::vector<Json> records;
  for (const std::string& text : read_journal(journal_file(settings_.state)))
    if (Json record = Json::parse(text, nullptr, false); record.is_object()) records.push_back(std::move(record));
  replaying_ = true;
  // Requests that ran as one do so again: none begins before all of them are there.
  std::optional<EngineThread::Hold> hold(std::in_place, thread_);
  std::vector<std::pair<std::string, Json>> runs;
  std::map<std::string, Json> samplers;
  for (const Json& record : records) {
    const Fields fields(record);
    if (fields.has("session") && !fields.has("run") && !fields.has("sampler")) {
      Session& session = sessions_.add(fields.text("session"), fields.number("created", 0));
      session.last_heard = seconds_since_1970();
      session.user_metadata = fields.member("user_metadata"), session.tags = fields.member("tags");
      session.sdk_version = fields.text("sdk_version", "");
    } else if (fields.has("run")) {
      runs.emplace_back(fields.text("run"), record);
    } else if (fields.has("sampler")) {
      samplers[fields.text("sampler")] = record;
    } else if (fields.has("closed_sampler")) {
      samplers.erase(fields.text("closed_sampler"));
    } else if (fields.has("ended")) {
      if (Session* session = sessions_.find(fields.text("ended"))) session->finished = "finished";
      std::erase_if(samplers, [&](const auto& one) { return one.second.value("session", "") == fields.text("ended"); });
    }
  }
  for (const auto& [id, record] : samplers) restore_sampler(record);
  for (const auto& [id, record] : runs) {
    const Fields fields(record);
    TrainingRun& run = runs_.add(id);
    run.session = fields.text("session"), run.base = fields.text("base_model");
    run.part = read_part(fields);
    run.user_metadata = fields.member("user_metadata");
    run.created = run.last_request = fields.number("created", 0);
    const Session* session = sessions_.find(run.session);
    run.ended = session == nullptr || !session->finished.is_null() || !has_model(run.base);
    const std::string source = fields.text("source", "");
    if (!run.ended)
      restore_run(run, source.empty() ? std::nullopt : std::optional(checkpoint_name(source)),
                  fields.flag("optimizer", false));
  }
  replaying_ = false;
  hold.reset();
  joined_before_.clear();
  // The file begins anew with what is still of use.
  const fs::path next = settings_.state / "service.journal.next";
  std::error_code ignored;
  fs::remove(next, ignored);
  Journal journal(next, true);
  for (const Json& record : records) {
    const bool of_sampler = record.contains("sampler") || record.contains("closed_sampler");
    if (!of_sampler || samplers.contains(record.value("sampler", ""))) journal.append(record.dump());
  }
  fs::rename(next, journal_file(settings_.state));
  journal_.emplace(journal_file(settings_.state), settings_.sync_journal);
  minute_ = server_.after(kMinute, [this] { look_after(); });
}

// The run's last saved state, or its beginning, and behind it the requests that came since. A state is of use only if
// the journal has the results of all its requests: clients still ask for them.
void Service::restore_run(TrainingRun& run, const std::optional<CheckpointName>& source, bool optimizer) {
  const fs::path folder = folder_of_run(run.id);
  std::vector<std::int64_t> states = saved_states(folder);
  RunJournal& journal = journal_of(run.id);
  const RunJournal::Past past = journal.read();
  for (const auto& [number, request] : past.requests)
    while (!past.results.contains(number) && !states.empty() && states.back() >= number) {
      remove_folder(states_of(folder) / std::to_string(states.back()));
      states.pop_back();
    }
  joined_before_[run.id] = past.joined;
  for (const auto& [number, result] : past.results) {
    futures_.open(run.future(number));
    futures_.finish(run.future(number), result);
    futures_.let_go(run.future(number));
  }
  std::function<void()> make;
  const Json made{{"type", source ? "load_weights" : "create_model"}, {"model_id", run.id}};
  if (!states.empty())
    make = [this, id = run.id, base = run.base, part = run.part,
            at = states_of(folder) / std::to_string(states.back())] {
      engine_.load(id, base, part, at, true, pause_of(WorkKind::other));
    };
  else if (source)
    make = [this, id = run.id, base = run.base, part = run.part, at = checkpoints_.folder(*source), optimizer] {
      engine_.load(id, base, part, at, optimizer, pause_of(WorkKind::other));
      save_state(id, 0);
    };
  else
    make = [this, id = run.id, base = run.base, part = run.part] {
      engine_.create(id, base, part, pause_of(WorkKind::other));
    };
  start_creation(run, make, made.dump());
  if (!states.empty()) run.next = states.back() + 1;
  for (const auto& [number, request] : past.requests)
    if (number >= run.next) handle(request, [](const HttpAnswer&) {});
  if (!states.empty()) journal.begin_next(states.back());
}

void Service::restore_sampler(const Json& record) {
  const Fields fields(record);
  const std::string id = fields.text("sampler"), path = fields.text("path", "");
  Sampler& sampler = samplers_.add(id, fields.text("session"), fields.text("base_model"), seconds_since_1970());
  sampler.model_path = path;
  try {
    if (!has_part(fields))
      start_sampler(id, source_of(sampler.base, path));
    else if (fs::exists(folder_of_sampler(id)))
      start_sampler(id, {sampler.base, {}, folder_of_sampler(id), read_part(fields)});
    // Else the request that made it runs again.
  } catch (...) {
    thread_.add(id, [this, id, error = std::current_exception()] { engine_.fail_sampler(id, error); });
  }
}

}  // namespace espalier::serve
