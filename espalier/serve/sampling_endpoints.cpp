// Endpoints of samplers: their creation, samples, and which samples have ended.
#include <sys/random.h>

#include <utility>

#include "espalier/base/error.h"
#include "espalier/serve/sample_messages.h"
#include "espalier/serve/service.h"

namespace espalier::serve {
namespace {

constexpr const char* kSamplersLine = "samplers";  // of the engine's thread
constexpr std::size_t kMostSeen = 65536;           // numbers, and ended requests, that a sampler remembers

std::uint64_t random_seed() {
  std::uint64_t seed = 0;
  ESPALIER_INTERNAL(getrandom(&seed, sizeof seed, 0) == sizeof seed, "no random bytes");
  return seed;
}

Json completion_json(const Completion& one) {
  Json json{{"state", one.failed ? "failed" : "finished"}, {"request_id", one.future}};
  if (!one.failed) json["response_payload_uncompressed_size"] = one.bytes;
  return json;
}

Json completions_after(const CompletionLine& line, std::int64_t cursor) {
  Json completions = Json::array();
  std::int64_t newest = cursor;
  for (const Completion& one : line.completions) {
    if (one.cursor <= cursor) continue;
    completions.push_back(completion_json(one));
    newest = one.cursor;
  }
  return {{"completions", std::move(completions)}, {"cursor", newest}};
}

}  // namespace

// A checkpoint's weights, or a base model's where `path` is empty.
SamplerSource Service::source_of(const std::string& base, const std::string& path) {
  if (path.empty()) return {base_of(base).name, {}, {}, {}};
  const CheckpointName name = checkpoint_name(path);
  const Checkpoint* checkpoint = checkpoints_.find(name);
  if (checkpoint == nullptr) throw Refused{404, "there is no checkpoint " + path};
  return {checkpoint->base, {}, checkpoints_.folder(name), checkpoint->part};
}

Sampler& Service::open_sampler(const std::string& id, const std::string& session, const std::string& base,
                               const std::string& path) {
  const SamplerSource source = source_of(base, path);
  if (source.folder) engine_.check_checkpoint(source.base, *source.folder, false);
  make_room_for_sampler();
  Sampler& sampler = samplers_.add(id, session, source.base, seconds_since_1970());
  sampler.model_path = path;
  if (!session.empty())
    write_down({{"sampler", id}, {"session", session}, {"base_model", source.base}, {"path", path}});
  start_sampler(id, source);
  return sampler;
}

void Service::start_sampler(const std::string& id, const SamplerSource& source) {
  // Samples wait behind this in the same line; an error is told to each of them.
  thread_.add(kSamplersLine, [this, id, source] {
    try {
      engine_.open_sampler(id, source, {});
    } catch (...) {
      engine_.fail_sampler(id, std::current_exception());
    }
  });
}

// Closes the sampler that was used the longest ago and has nothing to do, if there are as many as there may be.
void Service::make_room_for_sampler() {
  if (std::ssize(samplers_.all()) < settings_.most_samplers) return;
  const Sampler* oldest = nullptr;
  for (const auto& [id, sampler] : samplers_.all())
    if (sampler.live == 0 && (oldest == nullptr || sampler.last_used < oldest->last_used)) oldest = &sampler;
  if (oldest == nullptr)
    throw Refused{429, text_of("this server has ", settings_.most_samplers, " samplers at a time")};
  close_sampler(std::string(oldest->id));
}

void Service::close_sampler(const std::string& id) {
  write_down({{"closed_sampler", id}});
  samplers_.remove(id);
  free_sampler(id);
}

void Service::free_sampler(const std::string& id) {
  thread_.add(kSamplersLine, [this, id, folder = folder_of_sampler(id)] {
    engine_.close_sampler(id);
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  });
}

void Service::create_sampling_session(Call& call) {
  const Fields fields = call.fields();
  const Session& session = session_of(fields);
  const std::string id = text_of(session.id, ":sample:", fields.integer("sampling_session_seq_id", 0, INT32_MAX));
  if (samplers_.find(id) == nullptr) {
    const std::string path = fields.text("model_path", "");
    open_sampler(id, session.id, path.empty() ? fields.text("base_model") : "", path);
  }
  call.answer({{"type", "create_sampling_session"}, {"sampling_session_id", id}});
}

Sampler& Service::sampler_of(const std::string& id) {
  Sampler* sampler = samplers_.find(id);
  if (sampler == nullptr) throw Refused{404, "unknown sampler " + id};
  sampler->last_used = seconds_since_1970();
  if (Session* session = sessions_.find(sampler->session)) session->last_heard = sampler->last_used;
  return *sampler;
}

void Service::join_sampling_session(Call& call) {
  Sampler& sampler = sampler_of(call.fields().text("sampling_session_id"));
  call.answer({{"type", "join_sampling_session"}, {"client_counter", ++sampler.clones}});
}

void Service::get_sampler(Call& call) {
  const Sampler& sampler = sampler_of(call.path[0]);
  Json json{{"sampler_id", sampler.id}, {"base_model", sampler.base}, {"model_path", nullptr}};
  if (!sampler.model_path.empty()) json["model_path"] = sampler.model_path;
  call.answer(json);
}

void Service::asample(Call& call) {
  const Fields fields = call.fields();
  std::string id = fields.text("sampling_session_id", "");
  if (id.empty()) {  // a sampler without a session, one for each model
    const std::string path = fields.text("model_path", ""), base = path.empty() ? fields.text("base_model") : "";
    id = "direct:" + path + base;
    if (samplers_.find(id) == nullptr) open_sampler(id, "", base, path);
  }
  Sampler& sampler = sampler_of(id);
  const std::int64_t samples = fields.integer("num_samples", 1, 1024, 1);
  const std::int64_t number = fields.integer("seq_id", 0, INT64_MAX, 0);
  const auto promise = [&](const std::string& future) {
    Json ids = Json::array();
    for (std::int64_t i = 0; i < samples; ++i) ids.push_back(text_of(future, '/', i));
    call.answer({{"request_id", future}, {"sample_sequence_ids", std::move(ids)}});
  };
  // A sample that was lost is asked for again under its number: its future has gone.
  if (const auto seen = sampler.seen.find(number);
      number > 0 && seen != sampler.seen.end() && futures_.has(seen->second))
    return promise(seen->second);
  if (live_samples_ + samples > settings_.most_samples)
    throw Refused{429, text_of("this server draws ", settings_.most_samples, " samples at a time: try again")};
  const std::string future = number > 0 ? text_of(id, '#', number) : text_of(id, "#u", ++unnumbered_);
  if (number > 0) sampler.seen[number] = future;
  if (sampler.seen.size() > kMostSeen) sampler.seen.erase(sampler.seen.begin());
  futures_.open(future);
  std::shared_ptr<SampleCall> work;
  try {
    work = std::make_shared<SampleCall>(sample_call(fields, base_of(sampler.base)));
  } catch (const Error& error) {
    end_sample(id, number / kNumbersOfAClone, future, 0, error_result(error.what(), "user"));
    return promise(future);
  }
  if (!work->seed) work->seed = random_seed();
  const std::int64_t ticket = ++last_ticket_;
  tickets_[future] = ticket;
  live_samples_ += samples, ++sampler.live;
  const auto done = [this, alive = alive_, id, clone = number / kNumbersOfAClone, future, samples, work](
                        const SampleAnswer* answer, std::exception_ptr error) {
    FutureResult result;
    if (answer != nullptr) {
      for (const SampledSequence& one : answer->sequences) engine_counts_.sampled_tokens += std::ssize(one.tokens);
      engine_counts_.samples += std::ssize(answer->sequences);
      engine_counts_.prompt_tokens += std::ssize(work->prompt), engine_counts_.cached_tokens += answer->cached_tokens;
    }
    try {
      result = error ? result_of_error(error) : protobuf_result(write_sample(*answer, *work));
    } catch (...) {
      result = result_of_error(std::current_exception());
    }
    server_.post([this, alive, id, clone, future, samples, result = std::move(result)] {
      if (*alive) end_sample(id, clone, future, samples, result);
    });
  };
  const auto add = [this, id, ticket, work, done] {
    try {
      engine_.add_sample(id, ticket, *work, done, [this] { thread_.pause(); });
    } catch (const EngineThread::Stopped&) {
      throw;
    } catch (...) {
      done(nullptr, std::current_exception());
    }
  };
  thread_.add(kSamplersLine, {EngineThread::unit(add, true)});
  promise(future);
}

// `samples`: that lived; 0 for a request that was refused.
void Service::end_sample(const std::string& sampler_id, std::int64_t clone, const std::string& future,
                         std::int64_t samples, const FutureResult& result) {
  live_samples_ -= samples;
  tickets_.erase(future);
  const auto bytes = static_cast<std::int64_t>(result.body->size());
  answers_.failed_futures += result.failed ? 1 : 0;
  futures_.finish(future, result);
  Sampler* sampler = samplers_.find(sampler_id);
  if (sampler == nullptr) return;
  sampler->live -= samples > 0 ? 1 : 0;
  CompletionLine& line = sampler->line(clone);
  std::vector<Completion>& ended = line.completions;
  if (ended.size() >= kMostSeen) ended.erase(ended.begin(), ended.begin() + kMostSeen / 2);  // nobody polls for them
  ended.push_back({++line.last, future, result.failed, bytes});
  for (auto& [number, waiter] : std::exchange(line.waiters, {}))
    Call{{}, {}, std::move(waiter.respond)}.answer(completions_after(line, waiter.after));
}

void Service::retrieve_futures(Call& call) {
  const Fields fields = call.fields();
  const Fields target(fields.object("target"));
  const std::string id = target.text("sampling_session_id");
  Sampler& sampler = sampler_of(id);
  const std::int64_t clone = target.integer("cloned_sampler_id", 0, INT64_MAX, 0);
  const std::int64_t cursor = fields.integer("prev_cursor", 0, INT64_MAX, 0);
  CompletionLine& line = sampler.line(clone);
  if (const Json& fetched = fields.member("retrieved_request_ids"); fetched.is_array())
    for (const Json& one : fetched)
      if (one.is_string()) futures_.drop(one.get<std::string>());
  std::erase_if(line.completions, [&](const Completion& one) { return one.cursor <= cursor; });
  const double seconds = std::min(kPollSeconds, std::max(0.0, fields.number("timeout", kPollSeconds)));
  if (!line.completions.empty() || seconds == 0) return call.answer(completions_after(line, cursor));
  const std::int64_t number = ++last_waiter_;
  auto timer = server_.after(seconds, [this, id, clone, number] {
    Sampler* const waiting = samplers_.find(id);
    if (waiting == nullptr) return;
    CompletionLine& of = waiting->line(clone);
    const auto found = of.waiters.find(number);
    if (found == of.waiters.end()) return;
    const CompletionLine::Waiter waiter = std::move(found->second);
    of.waiters.erase(found);
    Call{{}, {}, waiter.respond}.answer(completions_after(of, waiter.after));
  });
  line.waiters.emplace(number, CompletionLine::Waiter{cursor, call.respond, std::move(timer)});
}

void Service::cancel_future(Call& call) {
  const std::string future = call.fields().text("request_id");
  if (const auto found = tickets_.find(future); found != tickets_.end())
    thread_.add(kSamplersLine, [this, ticket = found->second] { engine_.cancel_sample(ticket); });
  call.answer(Json::object());
}

}  // namespace espalier::serve
