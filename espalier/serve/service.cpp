// Routes, and the parts that all endpoints share.
#include "espalier/serve/service.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/serve/gradient_unit.h"

namespace espalier::serve {
namespace {

// Equal bytes, in a time that does not depend on where they differ.
bool same_key(std::string_view a, std::string_view b) {
  unsigned differs = a.size() != b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    differs |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  return differs == 0;
}

std::string unescaped(std::string_view text) {
  std::string out;
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escaped = text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 && digit(text[i + 2]) >= 0;
    out += escaped ? static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2])) : text[i];
    if (escaped) i += 2;
  }
  return out;
}

// True if the path fits a pattern. Each * of it stands for one part, which is added to `parts`.
bool fits(std::string_view pattern, std::string_view path, std::vector<std::string>& parts) {
  parts.clear();
  while (!pattern.empty() && !path.empty()) {
    const std::size_t p = pattern.find('/', 1), q = path.find('/', 1);
    const std::string_view want = pattern.substr(0, p), got = path.substr(0, q);
    if (want == "/*" && got.size() > 1)
      parts.push_back(unescaped(got.substr(1)));
    else if (want != got)
      return false;
    pattern = p == pattern.npos ? std::string_view() : pattern.substr(p);
    path = q == path.npos ? std::string_view() : path.substr(q);
  }
  return pattern.empty() && path.empty();
}

HttpAnswer detail_answer(int status, const std::string& detail) {
  const Json json{{"detail", detail}};
  return {status, "application/json",
          std::make_shared<const std::string>(json.dump(-1, ' ', true, Json::error_handler_t::replace))};
}

}  // namespace

namespace {

// A defect of the server, or of its machine, which its operator has to know.
FutureResult server_error(const std::string& text) {
  std::fprintf(stderr, "espalier serve: %s\n", text.c_str());
  return error_result(text, "server");
}

}  // namespace

FutureResult result_of_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const InternalError& internal) {
    return server_error(internal.what());
  } catch (const Error& known) {
    return error_result(known.what(), "user");
  } catch (const Refused& refused) {
    return error_result(refused.detail, "user");
  } catch (const std::bad_alloc&) {
    return server_error("the server has no memory left for this request");
  } catch (const std::exception& other) {
    return server_error(other.what());
  }
}

Service::Service(Engine& engine, HttpServer& server, const ServiceSettings& settings)
    : engine_(engine),
      server_(server),
      settings_(settings),
      futures_(server, settings.result_bytes),
      checkpoints_(settings.state),
      thread_([this] { engine_.begin_thread(); },
              [this] { return timed(WorkKind::samples, [this] { return engine_.step_samples(); }); }) {
  futures_.set_waiting_reason([this](const std::string& future) { return waiting_reason(future); });
}

std::string Service::waiting_reason(const std::string& future) const {
  const std::string id = future.substr(0, future.rfind('#'));
  const auto run = runs_.all().find(id);
  if (run == runs_.all().end()) return "";
  for (const auto& [number, unit] : run->second.early)
    if (run->second.future(number) == future)
      return text_of("request ", run->second.next, " of this model has not come yet, and this one comes after it");
  const std::string running = thread_.running();
  if (running.empty() || running == id || thread_.has_begun(id)) return "";
  return text_of("the engine works for another client; ", thread_.waiting(), " pieces of work wait for it");
}

Service::~Service() {
  *alive_ = false;
  if (lock_ >= 0) ::close(lock_);
}

void Service::Call::answer(const Json& json, int status) const {
  respond({status, "application/json",
           std::make_shared<const std::string>(json.dump(-1, ' ', true, Json::error_handler_t::replace))});
}

const std::vector<Service::Route>& Service::routes() {
  static const std::vector<Route> table = {
      {"GET", "/", &Service::page},
      {"GET", "/metrics", &Service::metrics},
      {"GET", "/api/v1/espalier/status", &Service::status},
      {"GET", "/api/v1/healthz", &Service::healthz},
      {"GET", "/api/v1/get_server_capabilities", &Service::get_server_capabilities},
      {"POST", "/api/v1/client/config", &Service::client_config},
      {"POST", "/api/v1/client/dynamic_config", &Service::dynamic_config},
      {"POST", "/api/v1/telemetry", &Service::telemetry},
      {"POST", "/api/v1/create_session", &Service::create_session},
      {"POST", "/api/v1/session_heartbeat", &Service::session_heartbeat},
      {"POST", "/api/v1/sessions/*/finish", &Service::finish_session},
      {"POST", "/api/v1/retrieve_future", &Service::retrieve_future},
      {"POST", "/api/v1/create_model", &Service::create_model},
      {"POST", "/api/v1/get_info", &Service::get_info},
      {"POST", "/api/v1/forward_backward", &Service::forward_backward},
      {"POST", "/api/v1/optim_step", &Service::optim_step},
      {"POST", "/api/v1/save_weights", &Service::save_weights},
      {"POST", "/api/v1/save_weights_for_sampler", &Service::save_weights_for_sampler},
      {"POST", "/api/v1/save_weights_external", &Service::save_weights_external},
      {"POST", "/api/v1/load_weights", &Service::load_weights},
      {"POST", "/api/v1/weights_info", &Service::weights_info},
      {"GET", "/api/v1/training_runs", &Service::list_runs},
      {"GET", "/api/v1/training_runs/*", &Service::get_run},
      {"GET", "/api/v1/training_runs/*/checkpoints", &Service::list_run_checkpoints},
      {"GET", "/api/v1/checkpoints", &Service::list_checkpoints},
      {"DELETE", "/api/v1/training_runs/*/checkpoints/*/*", &Service::delete_checkpoint},
      {"PUT", "/api/v1/training_runs/*/checkpoints/*/*/ttl", &Service::set_checkpoint_ttl},
      {"GET", "/api/v1/training_runs/*/checkpoints/*/*/external_weights_urls", &Service::external_weights_urls},
      {"GET", "/files/*/*", &Service::send_file},
      {"GET", "/api/v1/sessions", &Service::list_sessions},
      {"GET", "/api/v1/sessions/*", &Service::get_session},
      {"POST", "/api/v1/create_sampling_session", &Service::create_sampling_session},
      {"POST", "/api/v1/join_sampling_session", &Service::join_sampling_session},
      {"GET", "/api/v1/samplers/*", &Service::get_sampler},
      {"POST", "/api/v1/asample", &Service::asample},
      {"POST", "/api/v1/retrieve_futures", &Service::retrieve_futures},
      {"POST", "/api/v1/cancel_future", &Service::cancel_future},
  };
  return table;
}

std::optional<HttpAnswer> Service::refuse(const HttpRequest& head) const {
  if (settings_.api_keys.empty() || !head.path.starts_with("/api/") || head.path == "/api/v1/healthz") return {};
  bool known = false;
  for (const std::string& key : settings_.api_keys) known |= same_key(key, head.header("x-api-key"));
  if (known) return {};
  return detail_answer(401, "wrong or missing X-API-Key: this server was started with --api-key-file");
}

void Service::handle(HttpRequest request, Respond respond) {
  answers_.bytes_in += static_cast<std::int64_t>(request.body.size());
  const auto counted = [this, respond = std::move(respond)](HttpAnswer answer) {
    ++answers_.by_status[answer.status];
    respond(std::move(answer));
  };
  Call call{std::move(request), {}, counted};
  try {
    dispatch(call);
  } catch (const Refused& refused) {
    call.respond(detail_answer(refused.status, refused.detail));
  } catch (const InternalError& error) {
    call.respond(detail_answer(500, error.what()));
  } catch (const Error& error) {
    call.respond(detail_answer(400, error.what()));
  } catch (const std::exception& error) {
    call.respond(detail_answer(500, error.what()));
  }
}

void Service::dispatch(Call& call) {
  bool other_method = false;
  for (const Route& route : routes()) {
    if (!fits(route.path, call.request.path, call.path)) continue;
    if (call.request.method == route.method) return (this->*route.endpoint)(call);
    other_method |= call.path.empty();  // a name in the path may be that of an endpoint which this server lacks
  }
  if (other_method) throw Refused{405, call.request.path + " does not take " + call.request.method};
  if (!call.request.path.starts_with("/api/")) throw Refused{404, "there is nothing at " + call.request.path};
  throw Refused{501, call.request.method + " " + call.request.path +
                         " is not a part of this server: docs/serve.md lists what it has"};
}

Session& Service::session_of(const Fields& fields) {
  Session* session = sessions_.find(fields.text("session_id"));
  if (session == nullptr) throw Refused{404, "unknown session " + fields.text("session_id")};
  if (!session->finished.is_null()) throw Refused{410, "the session has finished: " + session->id};
  session->last_heard = seconds_since_1970();
  return *session;
}

TrainingRun& Service::run_of(const std::string& model_id) {
  TrainingRun* run = runs_.find(model_id);
  if (run == nullptr) throw Refused{404, "unknown model " + model_id};
  if (run->ended) throw Refused{410, "the session of model " + model_id + " has ended"};
  run->last_request = seconds_since_1970();
  if (Session* session = sessions_.find(run->session)) session->last_heard = run->last_request;
  return *run;
}

bool Service::is_live(const std::string& run_id) {
  const TrainingRun* run = runs_.find(run_id);
  return run != nullptr && !run->ended;
}

const BaseModel& Service::base_of(const std::string& name) const {
  for (const BaseModel& model : engine_.models())
    if (model.name == name) return model;
  std::string names;
  for (const BaseModel& model : engine_.models()) names += (names.empty() ? "" : ", ") + model.name;
  throw InputError({"base_model", names, '"' + name + '"', "the server's --model options name its models"});
}

namespace {

FutureResult result_of(const std::function<FutureResult()>& work) {
  try {
    return work();
  } catch (const EngineThread::Stopped&) {
    throw;
  } catch (...) {
    return result_of_error(std::current_exception());
  }
}

}  // namespace

void Service::count_queued(const std::string& run_id, std::int64_t bytes) {
  queued_bytes_ += bytes;
  if ((queued_of_[run_id] += bytes) == 0) queued_of_.erase(run_id);
}

void Service::end_request(const std::string& run_id, std::int64_t number, std::int64_t bytes,
                          const FutureResult& result, RunJournal::Joined joined) {
  count_queued(run_id, -bytes);
  const std::string future = text_of(run_id, '#', number);
  const bool lives = is_live(run_id);
  try {
    if (result.body && !futures_.is_done(future) && number > 0 && lives)
      journal_of(run_id).add_result(number, result, joined);
    // Not before: a state stands for all of its requests, whose results clients may still ask for.
    if (const auto state = untaken_states_.find(run_id); state != untaken_states_.end() && state->second == number) {
      untaken_states_.erase(state);
      if (lives) took_state(run_id, number);
    }
  } catch (const Error&) {  // a full disk: a restarted server computes it again
  }
  answers_.failed_futures += result.failed ? 1 : 0;
  if (result.body) futures_.finish(future, result);
}

std::shared_ptr<Unit> Service::unit_of(const std::string& run_id, std::int64_t number, std::int64_t bytes, Work work) {
  count_queued(run_id, bytes);
  const auto run = [this, alive = alive_, run_id, number, bytes, work = std::move(work)] {
    FutureResult result = result_of([&] { return work(number); });
    server_.post([this, alive, run_id, number, bytes, result = std::move(result)] {
      if (*alive) end_request(run_id, number, bytes, result, {number, number});
    });
  };
  return EngineThread::unit(run, true);
}

std::shared_ptr<Unit> Service::gradient_unit(const std::string& run_id, std::int64_t number, std::int64_t bytes,
                                             std::shared_ptr<const TrainingCall> call) {
  count_queued(run_id, bytes);
  std::optional<RunJournal::Joined> before;
  if (const auto run = joined_before_.find(run_id); run != joined_before_.end())
    if (const auto joined = run->second.find(number); joined != run->second.end()) before = joined->second;
  const auto compute = [this, alive = alive_, run_id](const std::vector<GradientUnit::Part>& parts) {
    std::vector<const TrainingCall*> calls;
    for (const GradientUnit::Part& part : parts) calls.push_back(part.call.get());
    std::vector<TrainingOutcome> outcomes(parts.size());
    try {
      outcomes = timed(WorkKind::gradient,
                       [&] { return engine_.forward_backward(run_id, calls, pause_of(WorkKind::gradient)); });
    } catch (const EngineThread::Stopped&) {
      throw;
    } catch (...) {
      for (TrainingOutcome& outcome : outcomes) outcome.error = std::current_exception();
    }
    // Else the journal of a model that takes no steps would only grow.
    if (!parts.back().call->backward) save_state_if_due(run_id, parts.back().number);
    const RunJournal::Joined joined{parts.front().number, parts.back().number};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      FutureResult result = result_of([&] {
        if (outcomes[i].error) std::rethrow_exception(outcomes[i].error);
        note_gradient(run_id, parts[i].number, outcomes[i].answer.metrics);
        return protobuf_result(write_forward_backward(outcomes[i].answer, *parts[i].call));
      });
      server_.post(
          [this, alive, run_id, number = parts[i].number, bytes = parts[i].bytes, joined, result = std::move(result)] {
            if (*alive) end_request(run_id, number, bytes, result, joined);
          });
    }
  };
  return std::make_shared<GradientUnit>(GradientUnit::Part{number, bytes, std::move(call)}, before,
                                        settings_.join_calls, compute);
}

std::int64_t Service::live_sessions() const {
  return std::ranges::count_if(sessions_.all(), [](const auto& one) { return one.second.finished.is_null(); });
}

// On the engine's thread.
void Service::note_gradient(const std::string& run, std::int64_t number, const std::map<std::string, double>& metrics) {
  const auto computed = static_cast<std::int64_t>(metrics.at("tokens_computed:sum")),
             shared = static_cast<std::int64_t>(metrics.at("tokens_shared:sum"));
  ++engine_counts_.gradients;
  engine_counts_.rows_computed += computed, engine_counts_.rows_shared += shared;
  server_.post([this, alive = alive_, run, number, computed, shared, loss = metrics.at("loss:sum")] {
    if (!*alive || !is_live(run)) return;
    RunHistory& history = histories_[run];
    history.rows_computed += computed, history.rows_shared += shared;
    history.calls.push_back({number, loss});
    if (history.calls.size() > RunHistory::kMost) history.calls.pop_front();
  });
}

void Service::enqueue(Call& call, TrainingRun& run, std::int64_t number, std::int64_t bytes,
                      const std::function<std::shared_ptr<Unit>()>& make) {
  const std::string future = run.future(number);
  const auto promise = [&] { call.answer({{"request_id", future}, {"model_id", run.id}}); };
  if (run.has_seen(number)) return promise();
  if (run.early.size() >= kMostEarly && number != run.next)
    throw Refused{429, text_of("too many requests of ", run.id, " wait for seq_id ", run.next)};
  // The request that early ones wait for is never refused: they go on with it.
  const bool lets_others_go_on = number == run.next && !run.early.empty();
  // One model's large requests do not keep another's small ones from their turn.
  const auto own = queued_of_.find(run.id);
  const bool is_small =
      (own == queued_of_.end() ? 0 : own->second) + bytes <= settings_.queue_bytes / settings_.most_models;
  if (!replaying_ && queued_bytes_ + bytes > settings_.queue_bytes && queued_bytes_ > 0 && !lets_others_go_on &&
      !is_small)
    throw Refused{429, text_of("the requests that wait take ", format_bytes(queued_bytes_), " of the ",
                               format_bytes(settings_.queue_bytes), " that they may: try again")};
  if (!replaying_) try {
      journal_of(run.id).add_request(number, call.request);
    } catch (const Error& error) {
      throw Refused{503, error.what()};
    }
  run.early[number] = {make(), bytes};
  futures_.open(future);
  std::vector<std::shared_ptr<Unit>> ready;
  for (auto next = run.early.begin(); next != run.early.end() && next->first == run.next; next = run.early.begin()) {
    ready.push_back(std::move(next->second.unit));
    run.early.erase(next);
    ++run.next;
  }
  thread_.add(run.id, std::move(ready));
  promise();
}

void Service::accept(Call& call, TrainingRun& run, std::optional<std::int64_t> given, Work work, bool changes) {
  const std::int64_t number = given.value_or(run.free_number());
  const std::int64_t bytes = std::ssize(call.request.body);
  enqueue(call, run, number, bytes, [&] {
    // After a restart the result may be there already: only what the request changed is to be done again.
    const bool known = replaying_ && futures_.is_done(run.future(number));
    return unit_of(run.id, number, bytes,
                   known && !changes ? [](std::int64_t) { return FutureResult(); } : std::move(work));
  });
}

void Service::accept_refused(Call& call, TrainingRun& run, std::optional<std::int64_t> given, const std::string& why,
                             bool breaks_gradient) {
  const std::int64_t number = given.value_or(run.free_number());
  const bool again = run.has_seen(number);
  const auto work = [this, id = run.id, why, breaks_gradient](std::int64_t) {
    if (breaks_gradient) engine_.break_gradient(id, why, [this] { thread_.pause(); });
    return error_result(why, "user");
  };
  accept(call, run, number, work, breaks_gradient);
  // The client need not wait for the requests before.
  if (again) return;
  if (!replaying_) try {
      journal_of(run.id).add_result(number, error_result(why, "user"), {number, number});
    } catch (const Error&) {  // a restarted server refuses it again
    }
  futures_.finish(run.future(number), error_result(why, "user"));
}

}  // namespace espalier::serve
