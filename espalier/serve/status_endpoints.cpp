// Pages for people and for Prometheus.
#include <sstream>

#include "espalier/machine/memory.h"
#include "espalier/serve/page.h"
#include "espalier/serve/service.h"

namespace espalier::serve {
namespace {

// One metric in Prometheus' text format.
class MetricText {
 public:
  void add(const char* name, const char* kind, const char* help, double value, const std::string& labels = "") {
    if (name != last_)
      out_ << "# HELP espalier_" << name << ' ' << help << "\n# TYPE espalier_" << name << ' ' << kind << '\n';
    last_ = name;
    out_ << "espalier_" << name << labels << ' ' << value << '\n';
  }
  std::string take() { return std::move(out_).str(); }

 private:
  std::ostringstream out_;
  std::string last_;
};

std::string label(const char* name, const std::string& value) {
  std::string out = std::string("{") + name + "=\"";
  for (const char c : value)
    out += c == '"' || c == '\\' ? std::string("\\") + c : c == '\n' ? "\\n" : std::string(1, c);
  return out + "\"}";
}

}  // namespace

void Service::page(Call& call) {
  call.respond({200, "text/html; charset=utf-8", std::make_shared<const std::string>(page_text())});
}

void Service::metrics(Call& call) {
  MetricText text;
  const double now = seconds_since_1970();
  text.add("uptime_seconds", "gauge", "Seconds since the server started.", now - started_);
  text.add("resident_bytes", "gauge", "Memory of the process.", static_cast<double>(resident_bytes()));
  text.add("connections", "gauge", "Open connections.", static_cast<double>(server_.connections()));
  text.add("sessions", "gauge", "Sessions that have not ended.", static_cast<double>(live_sessions()));
  double oldest = 0;
  for (const auto& [id, session] : sessions_.all())
    if (session.finished.is_null()) oldest = std::max(oldest, now - session.last_heard);
  text.add("heartbeat_age_seconds", "gauge", "Longest silence of a session that has not ended.", oldest);
  std::int64_t runs = 0, early = 0;
  for (const auto& [id, run] : runs_.all()) runs += run.ended ? 0 : 1, early += std::ssize(run.early);
  text.add("models", "gauge", "Models in training.", static_cast<double>(runs));
  text.add("samplers", "gauge", "Open samplers.", static_cast<double>(samplers_.all().size()));
  text.add("live_samples", "gauge", "Sequences that are being sampled or wait for it.",
           static_cast<double>(live_samples_));
  text.add("waiting_units", "gauge", "Pieces of work that wait for the engine.",
           static_cast<double>(thread_.waiting()));
  text.add("early_requests", "gauge", "Requests that wait for an earlier one.", static_cast<double>(early));
  text.add("queued_bytes", "gauge", "Bytes of training requests that have not run.",
           static_cast<double>(queued_bytes_));
  text.add("futures", "gauge", "Futures that are kept.", static_cast<double>(futures_.count()));
  text.add("unfinished_futures", "gauge", "Futures without a result.", static_cast<double>(futures_.unfinished()));
  text.add("result_bytes", "gauge", "Bytes of results that are kept.", static_cast<double>(futures_.held_bytes()));
  const EngineCounts& engine = engine_counts_;
  const auto total = [&](const char* name, const char* help, const std::atomic<std::int64_t>& value) {
    text.add(name, "counter", help, static_cast<double>(value.load()));
  };
  total("rows_computed_total", "Tokens of training calls that ran.", engine.rows_computed);
  total("rows_shared_total", "Tokens of training calls that another datum had already.", engine.rows_shared);
  total("gradients_total", "Calls of forward and forward_backward.", engine.gradients);
  total("steps_total", "Optimizer steps.", engine.steps);
  total("states_saved_total", "States of models written for a restart.", engine.states_saved);
  total("samples_total", "Sequences sampled.", engine.samples);
  total("sampled_tokens_total", "Tokens sampled.", engine.sampled_tokens);
  total("prompt_tokens_total", "Tokens of the prompts of samples.", engine.prompt_tokens);
  total("cached_tokens_total", "Prompt tokens whose keys and values were there already.", engine.cached_tokens);
  for (std::size_t i = 0; i < kWorkKinds.size(); ++i)
    text.add("engine_seconds_total", "counter", "Seconds of the engine by kind of work.",
             1e-6 * static_cast<double>(engine.microseconds[i].load()), label("work", kWorkKinds[i]));
  for (const auto& [status, count] : answers_.by_status)
    text.add("answers_total", "counter", "Answers by HTTP status.", static_cast<double>(count),
             label("status", std::to_string(status)));
  text.add("failed_futures_total", "counter", "Futures that ended with an error.",
           static_cast<double>(answers_.failed_futures));
  text.add("request_bytes_total", "counter", "Bytes of request bodies.", static_cast<double>(answers_.bytes_in));
  call.respond({200, "text/plain; version=0.0.4", std::make_shared<const std::string>(text.take())});
}

void Service::status(Call& call) {
  const double now = seconds_since_1970();
  Json models = Json::array(), runs = Json::array(), samplers = Json::array();
  for (const BaseModel& model : engine_.models()) models.push_back(model.name);
  for (const auto& [id, run] : runs_.all()) {
    if (run.ended && !histories_.contains(id)) continue;
    const RunHistory& history = histories_[id];
    Json loss = Json::array();
    for (const RunHistory::Call& one : history.calls) loss.push_back(one.loss);
    runs.push_back({{"id", id},
                    {"base", run.base},
                    {"rank", run.part.rank},
                    {"ended", run.ended},
                    {"idle", now - run.last_request},
                    {"steps", history.steps},
                    {"rows_computed", history.rows_computed},
                    {"rows_shared", history.rows_shared},
                    {"loss", std::move(loss)}});
  }
  for (const auto& [id, sampler] : samplers_.all())
    samplers.push_back({{"id", id},
                        {"base", sampler.base},
                        {"path", sampler.model_path},
                        {"live", sampler.live},
                        {"idle", now - sampler.last_used}});
  call.answer({{"version", "espalier " + settings_.version},
               {"uptime", now - started_},
               {"models", models},
               {"rows_computed", engine_counts_.rows_computed.load()},
               {"rows_shared", engine_counts_.rows_shared.load()},
               {"sampled_tokens", engine_counts_.sampled_tokens.load()},
               {"prompt_tokens", engine_counts_.prompt_tokens.load()},
               {"cached_tokens", engine_counts_.cached_tokens.load()},
               {"waiting", thread_.waiting()},
               {"live_samples", live_samples_},
               {"resident_bytes", resident_bytes()},
               {"runs", runs},
               {"samplers", samplers}});
}

}  // namespace espalier::serve
