// Endpoints of sessions and of what clients ask before they work.
#include <cstdio>

#include "espalier/base/error.h"
#include "espalier/serve/service.h"

namespace espalier::serve {
namespace {

// The newest version of the SDK that was tested, whose protocol moves from version to version.
constexpr int kTestedMajor = 0, kTestedMinor = 38;

Json warning_of(const std::string& version) {
  int major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return nullptr;
  if (major < kTestedMajor || (major == kTestedMajor && minor <= kTestedMinor)) return nullptr;
  return text_of("tinker ", version, " is newer than the versions that this server was tested with (to ", kTestedMajor,
                 '.', kTestedMinor, "): a call may fail that did not before");
}

}  // namespace

void Service::healthz(Call& call) { call.answer({{"status", "ok"}}); }

void Service::get_server_capabilities(Call& call) {
  Json models = Json::array();
  for (const BaseModel& model : engine_.models())
    models.push_back(
        {{"model_name", model.name}, {"max_context_length", model.context}, {"trainable", true}, {"sampleable", true}});
  call.answer({{"supported_models", models}, {"server", "espalier " + settings_.version}});
}

// Limits that are higher than the SDK's own keep a call in one request, whose data then share their prompts.
void Service::client_config(Call& call) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  call.answer({{"pjwt_auth_enabled", false},
               {"credential_default_source", "api_key"},
               {"parallel_fwdbwd_chunks", true},
               {"proto_compress_fwdbwd", true},
               {"fwdbwd_max_chunk_len", kMostData},
               {"fwdbwd_max_chunk_bytes_count", kBytes},
               {"fwdbwd_dispatch_bytes_semaphore_size", kBytes},
               {"sample_dispatch_bytes_semaphore_size", kBytes},
               {"inflight_response_bytes_semaphore_size", kBytes},
               // One poll for each sample: a server that was restarted cannot tell a poll for all what it has lost.
               {"sample_use_retrieve_futures", false},
               {"sample_join_sampling_session", true},
               {"sample_max_concurrent_requests", 2000},
               {"sample_no_retries", false},
               {"sample_enable_stuck_detection", true},
               {"use_pyqwest_transport", true},
               {"custom_loss_server_side", false}});
}

void Service::dynamic_config(Call& call) {
  call.answer({{"refresh_interval_sec", 300}, {"sample_cancel_enabled", true}, {"sample_cancel_max_batch_size", 64}});
}

void Service::telemetry(Call& call) { call.answer({{"status", "accepted"}}); }

void Service::create_session(Call& call) {
  const Fields fields = call.fields();
  Session& session = sessions_.add(random_name("s"), seconds_since_1970());
  session.user_metadata = fields.member("user_metadata");
  session.tags = fields.member("tags");
  session.sdk_version = fields.text("sdk_version", "");
  session.project = fields.text("project_id", "");
  write_down({{"session", session.id},
              {"created", session.created},
              {"user_metadata", session.user_metadata},
              {"tags", session.tags},
              {"sdk_version", session.sdk_version}});
  call.answer({{"type", "create_session"},
               {"session_id", session.id},
               {"info_message", nullptr},
               {"warning_message", warning_of(session.sdk_version)},
               {"error_message", nullptr}});
}

void Service::session_heartbeat(Call& call) {
  session_of(call.fields());
  call.answer({{"type", "session_heartbeat"}});
}

void Service::finish_session(Call& call) {
  Session* session = sessions_.find(call.path[0]);
  if (session == nullptr) throw Refused{404, "unknown session " + call.path[0]};
  const Fields fields = call.fields();
  if (session->finished.is_null()) {
    session->finished = fields.has("reason") ? fields.member("reason") : Json("finished");
    end_session(session->id);
  }
  call.answer(Json::object());
}

void Service::retrieve_future(Call& call) {
  const Fields fields = call.fields();
  futures_.poll(fields.text("request_id"), fields.flag("allow_metadata_only", false), call.respond);
}

}  // namespace espalier::serve
