// The service: endpoints of the protocol that the tinker SDK speaks, on the server's thread.
//
// A request of work is checked, gets a future, takes its turn, and runs on the engine's thread; its result comes back
// to this thread. Endpoints and rules: docs/serve.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "espalier/serve/engine.h"
#include "espalier/serve/engine_thread.h"
#include "espalier/serve/fields.h"
#include "espalier/serve/futures.h"
#include "espalier/serve/http.h"
#include "espalier/serve/sessions.h"
#include "espalier/serve/training_messages.h"
#include "espalier/serve/training_runs.h"

namespace espalier::serve {

struct ServiceSettings {
  std::string version;                                  // of Espalier
  std::vector<std::string> api_keys;                    // none: everybody may come
  std::int64_t unpacked_bytes = std::int64_t{1} << 30;  // of a body after decompression
  std::int64_t result_bytes = std::int64_t{1} << 30;    // of finished results that wait
  std::int64_t most_models = 64;                        // training models at a time
};

class Service {
 public:
  // All must outlive the service, which must die before `server` does.
  Service(Engine& engine, HttpServer& server, const ServiceSettings& settings);
  ~Service();

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

  Session& session_of(const Fields& fields);
  TrainingRun& run_of(const std::string& model_id);
  const BaseModel& base_of(const std::string& name) const;

  // Gives request `number` of the run a future, or finds the one it has, and answers with its name. `work` runs on the
  // engine's thread once its turn comes; what it throws becomes the future's error.
  using Work = std::function<FutureResult()>;
  void accept(Call& call, TrainingRun& run, std::optional<std::int64_t> number, Work work);
  // The same for a request that is wrong: its future fails at once, and its turn passes. `breaks_gradient`: the
  // gradient lacks its part from then on.
  void accept_refused(Call& call, TrainingRun& run, std::optional<std::int64_t> number, const std::string& why,
                      bool breaks_gradient);
  void start(const std::string& line, const std::string& future, Work work);
  std::string new_future_name(const TrainingRun& run);

  Engine& engine_;
  HttpServer& server_;
  const ServiceSettings settings_;
  Futures futures_;
  Sessions sessions_;
  TrainingRuns runs_;
  std::int64_t unnumbered_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // of this thread: results that come later are dropped
  EngineThread thread_;                                         // the last member: its work uses the others
};

// The result of a piece of work that failed.
FutureResult result_of_error(std::exception_ptr error);

}  // namespace espalier::serve
