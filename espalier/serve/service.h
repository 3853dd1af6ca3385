// The service: endpoints of the protocol that the tinker SDK speaks, on the server's thread.
//
// A request of work is checked, gets a future, takes its turn, and runs on the engine's thread; its result comes back
// to this thread. Endpoints and rules: docs/serve.md.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "espalier/serve/checkpoints.h"
#include "espalier/serve/counts.h"
#include "espalier/serve/engine.h"
#include "espalier/serve/engine_thread.h"
#include "espalier/serve/fields.h"
#include "espalier/serve/futures.h"
#include "espalier/serve/http.h"
#include "espalier/serve/journal.h"
#include "espalier/serve/run_journal.h"
#include "espalier/serve/samplers.h"
#include "espalier/serve/sessions.h"
#include "espalier/serve/training_messages.h"
#include "espalier/serve/training_runs.h"

namespace espalier::serve {

struct ServiceSettings {
  std::string version;                                  // of Espalier
  std::vector<std::string> api_keys;                    // none: everybody may come
  std::int64_t unpacked_bytes = std::int64_t{1} << 30;  // of a body after decompression
  std::int64_t result_bytes = std::int64_t{1} << 30;    // of finished results that wait
  std::int64_t most_models = 64, most_samplers = 256;   // at a time
  std::int64_t most_samples = 10'000;                   // live sequences
  std::filesystem::path state;                          // the server's folder
  bool sync_journal = false;                            // what is accepted survives the machine, not only the process
  std::int64_t queue_bytes = std::int64_t{2} << 30;     // of requests that have not run
  bool join_calls = true;      // consecutive forward_backward calls of a model that wait run as one
  std::int64_t save_freq = 0;  // steps of a model between its saved states; 0: by the time that they take
};

class Service {
 public:
  // All must outlive the service, which must die before `server` does.
  Service(Engine& engine, HttpServer& server, const ServiceSettings& settings);
  ~Service();

  // Takes up what a former server left in the folder: sessions, models, requests that were accepted, results, samplers.
  // Before the server runs.
  void restore();

  std::optional<HttpAnswer> refuse(const HttpRequest& head) const;  // before the body is read
  void handle(HttpRequest request, Respond respond);

 private:
  struct Call {  // a request on its way through an endpoint
    HttpRequest request;
    std::vector<std::string> path;  // what stands in place of the route's *
    Respond respond;

    Fields fields() const { return Fields::of_body(request.body); }
    void answer(const Json& json, int status = 200) const;
  };
  struct Route {
    const char *method, *path;  // "/api/v1/sessions/*/finish"
    void (Service::*endpoint)(Call&);
  };
  static const std::vector<Route>& routes();
  void dispatch(Call& call);

  void healthz(Call& call);
  void get_server_capabilities(Call& call);
  void client_config(Call& call);
  void dynamic_config(Call& call);
  void telemetry(Call& call);
  void create_session(Call& call);
  void session_heartbeat(Call& call);
  void finish_session(Call& call);
  void retrieve_future(Call& call);
  void create_model(Call& call);
  void get_info(Call& call);
  void forward_backward(Call& call);
  void optim_step(Call& call);
  void save_weights(Call& call);
  void save_weights_for_sampler(Call& call);
  void save_weights_external(Call& call);
  void load_weights(Call& call);
  void weights_info(Call& call);
  void list_runs(Call& call);
  void get_run(Call& call);
  void list_run_checkpoints(Call& call);
  void list_checkpoints(Call& call);
  void delete_checkpoint(Call& call);
  void set_checkpoint_ttl(Call& call);
  void external_weights_urls(Call& call);
  void send_file(Call& call);
  void list_sessions(Call& call);
  void get_session(Call& call);
  void create_sampling_session(Call& call);
  void join_sampling_session(Call& call);
  void get_sampler(Call& call);
  void asample(Call& call);
  void retrieve_futures(Call& call);
  void cancel_future(Call& call);
  void page(Call& call);
  void metrics(Call& call);
  void status(Call& call);

  Session& session_of(const Fields& fields);
  TrainingRun& run_of(const std::string& model_id);
  bool is_live(const std::string& run_id);
  Sampler& sampler_of(const std::string& id);
  const BaseModel& base_of(const std::string& name) const;

  TrainingRun& add_run(const std::string& id, const std::string& session, const std::string& base,
                       const TunedPart& part, const Json& user_metadata, const std::string& source = "",
                       bool optimizer = false);
  void save_checkpoint(Call& call, CheckpointKind kind, const char* type);
  void load_into(Call& call, const Fields& fields, const std::string& path);
  Json run_json(const TrainingRun& run) const;
  SamplerSource source_of(const std::string& base, const std::string& path);
  Sampler& open_sampler(const std::string& id, const std::string& session, const std::string& base,
                        const std::string& path);
  void start_sampler(const std::string& id, const SamplerSource& source);
  void close_sampler(const std::string& id);
  void free_sampler(const std::string& id);  // what the engine and the folder have of it
  void make_room_for_sampler();
  void end_sample(const std::string& sampler_id, std::int64_t clone, const std::string& future, std::int64_t samples,
                  const FutureResult& result);

  // Gives the run's request a future, or finds the one that its number has, and answers with its name. The request is
  // written down first. `work` runs on the engine's thread once its turn comes; what it throws becomes the future's
  // error. `changes`: the run is another one afterwards, so that a restarted server has to do it again.
  using Work = std::function<FutureResult(std::int64_t number)>;
  void accept(Call& call, TrainingRun& run, std::optional<std::int64_t> number, Work work, bool changes = true);
  // The same for a request that is wrong: its future fails at once, and its turn passes. `breaks_gradient`: the
  // gradient lacks its part from then on.
  void accept_refused(Call& call, TrainingRun& run, std::optional<std::int64_t> number, const std::string& why,
                      bool breaks_gradient);
  // The unit's work is done, on the server's thread. `bytes`: of the request.
  void end_request(const std::string& run, std::int64_t number, std::int64_t bytes, const FutureResult& result,
                   RunJournal::Joined joined);
  std::shared_ptr<Unit> unit_of(const std::string& run, std::int64_t number, std::int64_t bytes, Work work);
  std::shared_ptr<Unit> gradient_unit(const std::string& run, std::int64_t number, std::int64_t bytes,
                                      std::shared_ptr<const TrainingCall> call);
  // The common part: retries, limits, the journal, the order. `bytes`: of the request in memory.
  void enqueue(Call& call, TrainingRun& run, std::int64_t number, std::int64_t bytes,
               const std::function<std::shared_ptr<Unit>()>& make);
  void count_queued(const std::string& run, std::int64_t bytes);  // of a request that waits, or no longer does
  void start_creation(TrainingRun& run, std::function<void()> make, const std::string& result);

  // The folder of a run, in which its checkpoints are.
  std::filesystem::path folder_of_run(const std::string& run) const { return settings_.state / "runs" / run; }
  std::filesystem::path folder_of_sampler(const std::string& id) const { return settings_.state / "samplers" / id; }
  RunJournal& journal_of(const std::string& run);
  void write_down(const Json& record);  // in the journal of sessions, models and samplers
  void save_state_if_due(const std::string& run, std::int64_t number);  // on the engine's thread
  void save_state(const std::string& run, std::int64_t number);
  void took_state(const std::string& run, std::int64_t number);
  void restore_run(TrainingRun& run, const std::optional<CheckpointName>& source, bool optimizer);
  void restore_sampler(const Json& record);
  void end_session(const std::string& id);
  void look_after();  // every minute: what expires, what is silent
  bool has_model(const std::string& name) const;
  std::int64_t live_sessions() const;
  void note_gradient(const std::string& run, std::int64_t number, const std::map<std::string, double>& metrics);

  // Adds the time that `work` takes; on the engine's thread.
  template <class Timed>
  auto timed(WorkKind kind, Timed&& work) {
    const Clock clock{engine_counts_.microseconds[static_cast<std::size_t>(kind)], 1};
    return work();
  }
  // Inside of `timed`: work that does not count.
  template <class Untimed>
  void untimed(WorkKind kind, Untimed&& work) {
    const Clock clock{engine_counts_.microseconds[static_cast<std::size_t>(kind)], -1};
    work();
  }
  // For the engine, inside of timed(kind).
  Pause pause_of(WorkKind kind) {
    return [this, kind] { untimed(kind, [this] { thread_.pause(); }); };
  }
  struct Clock {
    std::atomic<std::int64_t>& sum;
    std::int64_t sign;
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    ~Clock() {
      const auto time = std::chrono::steady_clock::now() - begin;
      sum += sign * std::chrono::duration_cast<std::chrono::microseconds>(time).count();
    }
  };
  void lock_folder();
  void require_same_models();
  // Why a future has no result yet, if its client cannot know: an earlier request is missing, or others have their
  // turn.
  std::string waiting_reason(const std::string& future) const;
  bool is_held(const std::string& run, std::int64_t number) const;

  Engine& engine_;
  HttpServer& server_;
  const ServiceSettings settings_;
  Futures futures_;
  Sessions sessions_;
  TrainingRuns runs_;
  Checkpoints checkpoints_;
  Samplers samplers_;
  std::map<std::string, std::int64_t> tickets_;  // of live samples, by future
  struct SignedFile {
    std::filesystem::path path;
    double expires = 0;
  };
  std::map<std::string, SignedFile> signed_files_;  // by a name that nobody can guess
  std::optional<Journal> journal_;                  // of sessions, models and samplers
  std::map<std::string, RunJournal> run_journals_;
  bool replaying_ = false;                                                           // requests come from a journal
  std::map<std::string, std::map<std::int64_t, RunJournal::Joined>> joined_before_;  // by run and request
  int lock_ = -1;                                                                    // of the server's folder
  std::int64_t unnumbered_ = 0, last_ticket_ = 0, last_waiter_ = 0, live_samples_ = 0, queued_bytes_ = 0;
  struct SavedState {
    double at = 0, seconds = 0;  // when, and how long it took
    std::int64_t steps = 0;      // since
  };
  std::map<std::string, std::int64_t> queued_of_;  // bytes of waiting requests, by run
  std::map<std::string, SavedState> saved_;        // by run; the engine's thread's own
  std::map<std::string, std::int64_t>
      untaken_states_;  // by run: written, while the result of their last request is not
  std::shared_ptr<void> minute_;
  double started_ = seconds_since_1970();
  EngineCounts engine_counts_;
  AnswerCounts answers_;
  std::map<std::string, RunHistory> histories_;                 // by run
  std::deque<std::string> shown_ended_;                         // runs that have ended and keep theirs
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // of this thread: results that come later are dropped
  EngineThread thread_;                                         // the last member: its work uses the others
};

// A request's place among its model's requests; none: it comes next.
std::optional<std::int64_t> number_of(const Fields& fields);

// The result of a piece of work that failed.
FutureResult result_of_error(std::exception_ptr error);

}  // namespace espalier::serve
