// Routes, and the parts that all endpoints share.
#include "espalier/serve/service.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "espalier/base/error.h"

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
  return {status,
          "application/json",
          std::make_shared<const std::string>(json.dump(-1, ' ', true, Json::error_handler_t::replace)),
          {}};
}

}  // namespace

FutureResult result_of_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const InternalError& internal) {
    return error_result(internal.what(), "server");
  } catch (const Error& known) {
    return error_result(known.what(), "user");
  } catch (const Refused& refused) {
    return error_result(refused.detail, "user");
  } catch (const std::bad_alloc&) {
    return error_result("the server has no memory left for this request", "server");
  } catch (const std::exception& other) {
    return error_result(other.what(), "server");
  }
}

Service::Service(Engine& engine, HttpServer& server, const ServiceSettings& settings)
    : engine_(engine), server_(server), settings_(settings), futures_(server, settings.result_bytes), thread_([this] {
        engine_.begin_thread();
      }) {}

Service::~Service() { *alive_ = false; }

void Service::Call::answer(const Json& json, int status) const {
  respond({status,
           "application/json",
           std::make_shared<const std::string>(json.dump(-1, ' ', true, Json::error_handler_t::replace)),
           {}});
}

const std::vector<Service::Route>& Service::routes() {
  static const std::vector<Route> table = {
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
  Call call{std::move(request), {}, std::move(respond)};
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
    other_method = true;
  }
  if (other_method) throw Refused{405, call.request.path + " does not take " + call.request.method};
  if (!call.request.path.starts_with("/api/")) throw Refused{404, "there is nothing at " + call.request.path};
  throw Refused{501, call.request.method + " " + call.request.path +
                         " is not a part of this server: docs/serve.md lists what it has"};
}

Session& Service::session_of(const Fields& fields) {
  Session* session = sessions_.find(fields.text("session_id"));
  if (session == nullptr) throw Refused{404, "unknown session " + fields.text("session_id")};
  session->last_heard = seconds_since_1970();
  return *session;
}

TrainingRun& Service::run_of(const std::string& model_id) {
  TrainingRun* run = runs_.find(model_id);
  if (run == nullptr) throw Refused{404, "unknown model " + model_id};
  run->last_request = seconds_since_1970();
  if (Session* session = sessions_.find(run->session)) session->last_heard = run->last_request;
  return *run;
}

const BaseModel& Service::base_of(const std::string& name) const {
  for (const BaseModel& model : engine_.models())
    if (model.name == name) return model;
  std::string names;
  for (const BaseModel& model : engine_.models()) names += (names.empty() ? "" : ", ") + model.name;
  throw InputError({"base_model", names, '"' + name + '"', "the server's --model options name its models"});
}

std::string Service::new_future_name(const TrainingRun& run) { return run.id + "#u" + std::to_string(++unnumbered_); }

void Service::start(const std::string& line, const std::string& future, Work work) {
  thread_.add(line, [this, alive = alive_, future, work = std::move(work)] {
    FutureResult result;
    try {
      result = work();
    } catch (...) {
      result = result_of_error(std::current_exception());
    }
    server_.post([this, alive, future, result = std::move(result)] {
      if (*alive) futures_.finish(future, result);
    });
  });
}

void Service::accept(Call& call, TrainingRun& run, std::optional<std::int64_t> number, Work work) {
  const auto promise = [&](const std::string& future) { call.answer({{"request_id", future}, {"model_id", run.id}}); };
  if (!number) {
    const std::string future = new_future_name(run);
    futures_.open(future);
    start(run.id, future, std::move(work));
    return promise(future);
  }
  if (const auto seen = run.seen.find(*number); seen != run.seen.end()) return promise(seen->second);
  if (*number < run.next) throw Refused{400, text_of("seq_id ", *number, " of ", run.id, " has passed")};
  if (run.early.size() >= kMostEarly && *number != run.next)
    throw Refused{429, text_of("too many requests of ", run.id, " wait for seq_id ", run.next)};
  const std::string future = text_of(run.id, '#', *number);
  run.seen[*number] = future;
  futures_.open(future);
  run.early[*number] = [this, line = run.id, future, work = std::move(work)]() mutable {
    start(line, future, std::move(work));
  };
  for (auto next = run.early.begin(); next != run.early.end() && next->first == run.next; next = run.early.begin()) {
    next->second();
    run.early.erase(next);
    ++run.next;
  }
  promise(future);
}

void Service::accept_refused(Call& call, TrainingRun& run, std::optional<std::int64_t> number, const std::string& why,
                             bool breaks_gradient) {
  const bool again = number && run.seen.contains(*number);
  accept(call, run, number, [this, id = run.id, why, breaks_gradient] {
    if (breaks_gradient) engine_.break_gradient(id, why);
    return error_result(why, "user");
  });
  // The client need not wait for the requests before.
  if (number && !again) futures_.finish(run.seen[*number], error_result(why, "user"));
}

}  // namespace espalier::serve
