// Endpoints of checkpoints: saving, loading, listing, and their lives.
#include <utility>

#include "espalier/base/error.h"
#include "espalier/serve/service.h"

namespace espalier::serve {
namespace {

constexpr std::int64_t kLeastLife = 3600, kLongestLife = std::int64_t{3652} * 86400;  // of a checkpoint, in seconds

std::string name_in(const Fields& fields, std::optional<std::int64_t> number) {
  const std::string name = fields.text("path", number ? text_of("seq", *number) : "unnamed");
  require_plain_name(name, "path");
  return name;
}

std::optional<double> expiry_of(const Fields& fields) {
  if (!fields.has("ttl_seconds")) return {};
  return seconds_since_1970() + static_cast<double>(fields.integer("ttl_seconds", kLeastLife, kLongestLife));
}

Json checkpoint_json(const Checkpoint& one) {
  Json json{{"checkpoint_id", one.name.id()},
            {"checkpoint_type", type_name_of(one.name.kind)},
            {"time", time_text(one.created)},
            {"tinker_path", one.name.path()},
            {"size_bytes", one.bytes},
            {"public", false},
            {"user_metadata", one.user_metadata},
            {"expires_at", nullptr}};
  if (one.expires) json["expires_at"] = time_text(*one.expires);
  return json;
}

// A part of a list, as the query asks for it.
struct Page {
  std::int64_t offset = 0, limit = 0;

  static Page of(const std::string& query, std::int64_t limit) {
    const auto number = [&](const std::string& name, std::int64_t otherwise) {
      for (std::size_t begin = 0; begin < query.size();) {
        const std::size_t end = std::min(query.find('&', begin), query.size());
        if (query.compare(begin, name.size() + 1, name + "=") == 0) {
          const std::string text = query.substr(begin + name.size() + 1, end - begin - name.size() - 1);
          if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != text.npos)
            throw Refused{400, name + " is not a whole number: " + text};
          return static_cast<std::int64_t>(std::stol(text));
        }
        begin = end + 1;
      }
      return otherwise;
    };
    return {number("offset", 0), number("limit", limit)};
  }
  Json cut(const Json& all) const {
    Json out = Json::array();
    for (std::int64_t i = offset; i < std::min<std::int64_t>(offset + limit, std::ssize(all)); ++i)
      out.push_back(all[static_cast<std::size_t>(i)]);
    return out;
  }
  Json cursor(const Json& all) const { return {{"offset", offset}, {"limit", limit}, {"total_count", all.size()}}; }
};

}  // namespace

// Saves what the run has at the request's turn. `type`: of the answer.
void Service::save_checkpoint(Call& call, CheckpointKind kind, const char* type) {
  const Fields fields = call.fields();
  TrainingRun& run = run_of(fields.text("model_id"));
  const std::optional<std::int64_t> number = number_of(fields);
  Checkpoint made;
  try {
    if (fields.has("age_encryption_recipients") && !fields.member("age_encryption_recipients").empty())
      throw UnsupportedError({"age_encryption_recipients", "none: this server writes plain files", "some",
                              "leave it out; the files do not leave this machine unless you send them"});
    made.name = {run.id, kind, name_in(fields, number)};
    made.expires = expiry_of(fields);
  } catch (const Error& error) {
    return accept_refused(call, run, number, error.what(), false);
  }
  made.base = run.base, made.part = run.part, made.created = seconds_since_1970();
  made.user_metadata = fields.member("user_metadata");
  const bool replaces = fields.flag("overwrite", false) || kind != CheckpointKind::training;
  // Names are compared here, where the list is, although the run may be some requests behind.
  const bool again = replaying_ || (number && run.has_seen(*number));
  if (!replaces && !again && checkpoints_.find(made.name) != nullptr)
    return accept_refused(call, run, number, "a checkpoint " + made.name.path() + " exists: pass overwrite=True",
                          false);
  const std::filesystem::path folder = checkpoints_.folder(made.name);
  const auto save = [this, id = run.id, made, folder, kind, type](std::int64_t) {
    timed(WorkKind::saving, [&] { engine_.save(id, folder, kind, made.description(), pause_of(WorkKind::saving)); });
    server_.post([this, alive = alive_, made] {
      if (*alive) checkpoints_.add(made);
    });
    return json_result(Json{{"type", type}, {"path", made.name.path()}}.dump());
  };
  accept(call, run, number, save, false);
}

void Service::save_weights(Call& call) { save_checkpoint(call, CheckpointKind::training, "save_weights"); }
void Service::save_weights_external(Call& call) {
  save_checkpoint(call, CheckpointKind::external, "save_weights_external");
}

void Service::save_weights_for_sampler(Call& call) {
  const Fields fields = call.fields();
  if (fields.has("path")) return save_checkpoint(call, CheckpointKind::sampler, "save_weights_for_sampler");
  TrainingRun& run = run_of(fields.text("model_id"));
  const std::optional<std::int64_t> number = number_of(fields);
  std::string id;
  try {
    if (const std::string kind = fields.text("kind", "snapshot"); kind != "snapshot")
      throw UnsupportedError(
          {"kind", "snapshot", '"' + kind + '"', "a snapshot keeps its weights while training goes on"});
    id = text_of(run.session, ":sample:", fields.integer("sampling_session_seq_id", 0, INT32_MAX));
  } catch (const Error& error) {
    return accept_refused(call, run, number, error.what(), false);
  }
  const bool again = samplers_.find(id) != nullptr;
  if (!again) {
    make_room_for_sampler();
    samplers_.add(id, run.session, run.base, seconds_since_1970());
    Json record{{"sampler", id}, {"session", run.session}, {"base_model", run.base}};
    write_part(record, run.part);
    write_down(record);
  }
  const auto snapshot = [this, run_id = run.id, base = run.base, part = run.part, id](std::int64_t) {
    // A restarted server finds the weights in the folder.
    timed(WorkKind::saving, [&] {
      const Pause pause = pause_of(WorkKind::saving);
      engine_.save(run_id, folder_of_sampler(id), CheckpointKind::sampler, "{}", pause);
      engine_.open_sampler(id, {base, run_id, folder_of_sampler(id), part}, pause);
    });
    server_.post([this, alive = alive_, id] {
      if (*alive && samplers_.find(id) == nullptr) free_sampler(id);  // it was closed before its turn
    });
    return json_result(Json{{"type", "save_weights_for_sampler"}, {"sampling_session_id", id}}.dump());
  };
  accept(call, run, number, snapshot, false);
}

void Service::load_weights(Call& call) {
  const Fields fields = call.fields();
  const std::string path = fields.text("path");
  if (!fields.has("session_id")) return load_into(call, fields, path);
  const Session& session = session_of(fields);
  const std::string id = text_of(session.id, ":train:", fields.integer("model_seq_id", 0, INT32_MAX));
  const auto promise = [&] { call.answer({{"request_id", id + "#0"}, {"model_id", id}}); };
  if (runs_.find(id) != nullptr) return promise();
  const CheckpointName name = checkpoint_name(path);
  const Checkpoint* checkpoint = checkpoints_.find(name);
  if (checkpoint == nullptr) throw Refused{404, "there is no checkpoint " + path};
  base_of(checkpoint->base);
  const bool optimizer = fields.flag("optimizer", false);
  engine_.check_checkpoint(checkpoint->base, checkpoints_.folder(name), optimizer);
  TrainingRun& run =
      add_run(id, session.id, checkpoint->base, checkpoint->part, fields.member("user_metadata"), path, optimizer);
  const auto load = [this, id, source = *checkpoint, folder = checkpoints_.folder(name), optimizer] {
    engine_.load(id, source.base, source.part, folder, optimizer, pause_of(WorkKind::other));
    save_state(id, 0);  // the checkpoint may go
  };
  start_creation(run, load, Json{{"type", "load_weights"}, {"path", path}, {"model_id", id}}.dump());
  promise();
}

// As tinker did before 0.38: a model takes other weights.
void Service::load_into(Call& call, const Fields& fields, const std::string& path) {
  TrainingRun& run = run_of(fields.text("model_id"));
  const std::optional<std::int64_t> number = number_of(fields);
  std::filesystem::path folder;
  bool optimizer = false;
  try {
    const CheckpointName name = checkpoint_name(path);
    const Checkpoint* checkpoint = checkpoints_.find(name);
    if (checkpoint == nullptr) throw InputError({"path", "a checkpoint of this server", path, ""});
    checkpoint->require(run.base, run.part);
    folder = checkpoints_.folder(name);
    optimizer = fields.flag("optimizer", false);
    engine_.check_checkpoint(run.base, folder, optimizer);
  } catch (const Error& error) {
    return accept_refused(call, run, number, error.what(), false);
  }
  accept(call, run, number,
         [this, id = run.id, base = run.base, part = run.part, folder, optimizer, path](std::int64_t taken) {
           timed(WorkKind::other, [&] { engine_.load(id, base, part, folder, optimizer, pause_of(WorkKind::other)); });
           save_state(id, taken);  // the checkpoint may go
           return json_result(Json{{"type", "load_weights"}, {"path", path}, {"model_id", id}}.dump());
         });
}

void Service::weights_info(Call& call) {
  const std::string path = call.fields().text("tinker_path");
  const Checkpoint* checkpoint = checkpoints_.find(checkpoint_name(path));
  if (checkpoint == nullptr) throw Refused{404, "there is no checkpoint " + path};
  Json answer{{"base_model", checkpoint->base}, {"optimizer_config", {{"type", "adamw"}}}};
  tell_part(answer, checkpoint->part, true);
  call.answer(answer);
}

Json Service::run_json(const TrainingRun& run) const {
  Json last[2];
  for (const Checkpoint& one : checkpoints_.all())
    if (one.name.run == run.id && one.name.kind != CheckpointKind::external)
      last[one.name.kind == CheckpointKind::sampler] = checkpoint_json(one);
  Json out{{"training_run_id", run.id},
           {"base_model", run.base},
           {"model_owner", "local"},
           {"corrupted", false},
           {"last_request_time", time_text(run.last_request)},
           {"last_checkpoint", last[0]},
           {"last_sampler_checkpoint", last[1]},
           {"user_metadata", run.user_metadata}};
  tell_part(out, run.part);
  return out;
}

void Service::list_runs(Call& call) {
  Json all = Json::array();
  for (const auto& [id, run] : runs_.all()) all.push_back(run_json(run));
  const Page page = Page::of(call.request.query, 20);
  call.answer({{"training_runs", page.cut(all)}, {"cursor", page.cursor(all)}});
}

void Service::get_run(Call& call) { call.answer(run_json(run_of(call.path[0]))); }

void Service::list_run_checkpoints(Call& call) {
  Json all = Json::array();
  for (const Checkpoint& one : checkpoints_.all())
    if (one.name.run == call.path[0]) all.push_back(checkpoint_json(one));
  call.answer({{"checkpoints", all}});
}

void Service::list_checkpoints(Call& call) {
  Json all = Json::array();
  for (const Checkpoint& one : checkpoints_.all()) all.push_back(checkpoint_json(one));
  const Page page = Page::of(call.request.query, 100);
  call.answer({{"checkpoints", page.cut(all)}, {"cursor", page.cursor(all)}});
}

void Service::delete_checkpoint(Call& call) {
  const CheckpointName name = checkpoint_name(call.path[0], call.path[1], call.path[2]);
  if (!checkpoints_.remove(name)) throw Refused{404, "there is no checkpoint " + name.path()};
  call.answer(Json::object());
}

void Service::set_checkpoint_ttl(Call& call) {
  const CheckpointName name = checkpoint_name(call.path[0], call.path[1], call.path[2]);
  if (!checkpoints_.set_expiry(name, expiry_of(call.fields())))
    throw Refused{404, "there is no checkpoint " + name.path()};
  call.answer(Json::object());
}

// A folder's files under addresses that need no key and end after an hour.
void Service::external_weights_urls(Call& call) {
  constexpr double kSeconds = 3600;
  const CheckpointName name = checkpoint_name(call.path[0], call.path[1], call.path[2]);
  if (name.kind != CheckpointKind::external || checkpoints_.find(name) == nullptr)
    throw Refused{404, "there is no checkpoint " + name.path()};
  const double now = seconds_since_1970();
  std::erase_if(signed_files_, [&](const auto& one) { return one.second.expires <= now; });
  const std::string host(call.request.header("host")), scheme(call.request.header("x-forwarded-proto"));
  Json urls = Json::object();
  for (const std::filesystem::path& file : checkpoints_.files(name)) {
    const std::string secret = random_name("") + random_name("") + random_name("");
    signed_files_[secret] = {file, now + kSeconds};
    urls[file.filename().string()] =
        text_of(scheme == "https" ? "https" : "http", "://", host, "/files/", secret, '/', file.filename().string());
  }
  call.answer({{"urls", urls}, {"expires", time_text(now + kSeconds)}});
}

void Service::send_file(Call& call) {
  const auto found = signed_files_.find(call.path[0]);
  if (found == signed_files_.end() || found->second.expires <= seconds_since_1970() ||
      found->second.path.filename() != call.path[1])
    throw Refused{404, "there is no such file, or its address has expired"};
  HttpAnswer answer{200, "application/octet-stream"};
  answer.file = found->second.path.string();
  call.respond(std::move(answer));
}

void Service::list_sessions(Call& call) {
  Json all = Json::array();
  for (const auto& [id, session] : sessions_.all()) all.push_back(id);
  call.answer({{"sessions", Page::of(call.request.query, 20).cut(all)}});
}

void Service::get_session(Call& call) {
  Session* session = sessions_.find(call.path[0]);
  if (session == nullptr) throw Refused{404, "unknown session " + call.path[0]};
  Json runs = Json::array(), samplers = Json::array();
  for (const auto& [id, run] : runs_.all())
    if (run.session == session->id) runs.push_back(id);
  for (const auto& [id, sampler] : samplers_.all())
    if (sampler.session == session->id) samplers.push_back(id);
  call.answer({{"training_run_ids", runs},
               {"sampler_ids", samplers},
               {"user_metadata", session->user_metadata},
               {"display_name", nullptr}});
}

}  // namespace espalier::serve
