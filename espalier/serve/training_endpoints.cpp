// Endpoints of training models: creation, gradients, steps.
#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/serve/service.h"
#include "espalier/serve/unpack.h"

namespace espalier::serve {
namespace {

constexpr std::int64_t kMostRank = 512, kMostSequence = INT32_MAX;

// The hash of a name (FNV-1a): the same start values each time where a client gives no seed.
std::uint64_t seed_of(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash >> 1;
}

TunedPart part_of(const Fields& config, const std::string& model_id) {
  TunedPart out;
  out.rank = config.integer("rank", 1, kMostRank, out.rank);
  out.seed =
      config.has("seed") ? static_cast<std::uint64_t>(config.integer("seed", INT64_MIN, INT64_MAX)) : seed_of(model_id);
  out.attention = config.flag("train_attn", true);
  out.mlp = config.flag("train_mlp", true);
  out.head = config.flag("train_unembed", true);
  if (!out.attention && !out.mlp && !out.head)
    throw InputError({"lora_config", "train_attn, train_mlp or train_unembed", "none of them", ""});
  return out;
}

AdamParams read_adam(const Fields& fields) {
  if (!fields.has("adam_params"))
    throw UnsupportedError({"optim_step", "adam_params", "none", "this server's optimizer is AdamW"});
  const Fields given(fields.object("adam_params"));
  AdamParams out;
  out.learning_rate = given.number("learning_rate", out.learning_rate);
  out.beta1 = given.number("beta1", out.beta1), out.beta2 = given.number("beta2", out.beta2);
  out.eps = given.number("eps", out.eps);
  out.weight_decay = given.number("weight_decay", out.weight_decay);
  out.grad_clip_norm = given.number("grad_clip_norm", out.grad_clip_norm);
  const auto require = [](bool fine, const char* name, const char* expected, double got) {
    if (!fine) throw InputError({std::string("adam_params.") + name, expected, text_of(got), ""});
  };
  require(out.learning_rate >= 0, "learning_rate", "at least 0", out.learning_rate);
  require(out.beta1 >= 0 && out.beta1 < 1, "beta1", "a number in [0, 1)", out.beta1);
  require(out.beta2 >= 0 && out.beta2 < 1, "beta2", "a number in [0, 1)", out.beta2);
  require(out.eps >= 0, "eps", "at least 0", out.eps);
  require(out.grad_clip_norm >= 0, "grad_clip_norm", "at least 0", out.grad_clip_norm);
  return out;
}

}  // namespace

std::optional<std::int64_t> number_of(const Fields& fields) {
  if (!fields.has("seq_id")) return {};
  return fields.integer("seq_id", 1, kMostSequence);
}

TrainingRun& Service::add_run(const std::string& id, const std::string& session, const std::string& base,
                              const TunedPart& part, const Json& user_metadata, const std::string& source,
                              bool optimizer) {
  const auto live = std::ranges::count_if(runs_.all(), [](const auto& one) { return !one.second.ended; });
  if (live >= settings_.most_models)
    throw Refused{429, text_of("this server trains ", settings_.most_models, " models at a time")};
  const double now = seconds_since_1970();
  Json record{{"run", id},      {"session", session}, {"base_model", base},    {"user_metadata", user_metadata},
              {"created", now}, {"source", source},   {"optimizer", optimizer}};
  write_part(record, part);
  write_down(record);
  TrainingRun& run = runs_.add(id);
  run.session = session, run.base = base, run.part = part;
  run.user_metadata = user_metadata;
  run.created = run.last_request = now;
  return run;
}

// The first work of a model; what it throws becomes the error of the model's creation.
void Service::start_creation(TrainingRun& run, std::function<void()> make, const std::string& result) {
  futures_.open(run.future(0));
  thread_.add(run.id, {unit_of(run.id, 0, 0, [this, make = std::move(make), result](std::int64_t) {
                timed(WorkKind::other, make);
                return json_result(result);
              })});
}

void Service::create_model(Call& call) {
  const Fields fields = call.fields();
  const Session& session = session_of(fields);
  const std::string id = text_of(session.id, ":train:", fields.integer("model_seq_id", 0, kMostSequence));
  const auto promise = [&] { call.answer({{"request_id", id + "#0"}, {"model_id", id}}); };
  if (runs_.find(id) != nullptr) return promise();
  const BaseModel& base = base_of(fields.text("base_model"));
  if (!fields.has("lora_config"))
    throw UnsupportedError({"lora_config", "the settings of an adapter", "none", "this server trains adapters (LoRA)"});
  if (const std::string type = Fields(fields.object("optimizer_config")).text("type", "adamw"); type != "adamw")
    throw UnsupportedError({"optimizer_config", "adamw", '"' + type + '"', "this server's optimizer is AdamW"});
  const TunedPart part = part_of(Fields(fields.object("lora_config")), id);
  TrainingRun& run = add_run(id, session.id, base.name, part, fields.member("user_metadata"));
  start_creation(
      run, [this, id, name = base.name, part] { engine_.create(id, name, part, pause_of(WorkKind::other)); },
      Json{{"type", "create_model"}, {"model_id", id}}.dump());
  promise();
}

void Service::get_info(Call& call) {
  const TrainingRun& run = run_of(call.fields().text("model_id"));
  const BaseModel& base = base_of(run.base);
  Json answer{{"type", "get_info"},
              {"model_id", run.id},
              {"model_name", run.base},
              {"optimizer_config", {{"type", "adamw"}}},
              {"model_data", {{"arch", base.architecture}, {"model_name", run.base}, {"tokenizer_id", base.folder}}}};
  tell_part(answer, run.part);
  call.answer(answer);
}

void Service::forward_backward(Call& call) {
  if (call.request.header("content-type") != "application/x-protobuf")
    throw Refused{415, "forward_backward takes application/x-protobuf: use tinker 0.25 or newer"};
  std::string room;
  const std::string_view body =
      unpack(call.request.body, call.request.header("content-encoding"), settings_.unpacked_bytes, room);
  ForwardBackwardRequest request = read_forward_backward(bytes_of_text(body));
  TrainingRun& run = run_of(request.model_id);
  const auto number = request.seq_id > 0 ? std::optional(request.seq_id) : std::nullopt;
  const bool backward = !request.forward_only;
  std::optional<ErrorText> refused = std::move(request.refused);
  auto work = std::make_shared<TrainingCall>();
  if (!refused) try {
      *work = training_call(request.loss_fn, request.config, backward, std::move(request.data), base_of(run.base));
    } catch (const Error& error) {
      refused = error.text();
    }
  if (refused) {
    const std::string why = InputError(*refused).what();
    return accept_refused(call, run, number, why, backward);
  }
  const std::int64_t place = number.value_or(run.free_number());
  const std::int64_t bytes = std::ssize(body);
  enqueue(call, run, place, bytes, [&] {
    // After a restart the log-probs of a forward pass may be there already.
    const bool known = replaying_ && !backward && futures_.is_done(run.future(place));
    return known ? unit_of(run.id, place, bytes, [](std::int64_t) { return FutureResult(); })
                 : gradient_unit(run.id, place, bytes, work);
  });
}

void Service::optim_step(Call& call) {
  const Fields fields = call.fields();
  TrainingRun& run = run_of(fields.text("model_id"));
  const std::optional<std::int64_t> number = number_of(fields);
  AdamParams params;
  try {
    params = read_adam(fields);
  } catch (const Error& error) {
    return accept_refused(call, run, number, error.what(), false);
  }
  accept(call, run, number, [this, id = run.id, params](std::int64_t taken) {
    const auto metrics =
        timed(WorkKind::step, [&] { return engine_.optim_step(id, params, pause_of(WorkKind::step)); });
    ++engine_counts_.steps;
    server_.post([this, alive = alive_, id] {
      if (*alive && is_live(id)) ++histories_[id].steps;
    });
    save_state_if_due(id, taken);
    return json_result(Json{{"type", "optim_step"}, {"metrics", metrics}}.dump());
  });
}

}  // namespace espalier::serve
