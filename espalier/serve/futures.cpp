#include "espalier/serve/futures.h"

#include <utility>

#include "espalier/base/json.h"

namespace espalier::serve {
namespace {

HttpAnswer json_answer(int status, const Json& json) {
  return {status, "application/json", std::make_shared<const std::string>(json.dump())};
}

}  // namespace

FutureResult json_result(const std::string& text) { return {false, false, std::make_shared<const std::string>(text)}; }

FutureResult protobuf_result(std::string bytes) {
  return {true, false, std::make_shared<const std::string>(std::move(bytes))};
}

FutureResult error_result(const std::string& text, const char* category) {
  const Json json{{"error", text}, {"category", category}};
  return {false, true, std::make_shared<const std::string>(json.dump(-1, ' ', true, Json::error_handler_t::replace))};
}

void Futures::open(const std::string& id) {
  if (futures_.try_emplace(id).second) ++unfinished_;
}

bool Futures::is_done(const std::string& id) const {
  const auto found = futures_.find(id);
  return found != futures_.end() && found->second.done;
}

void Futures::finish(const std::string& id, FutureResult result) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.done) return;
  Future& future = found->second;
  future.done = true;
  --unfinished_;
  future.result = std::move(result);
  held_bytes_ += static_cast<std::int64_t>(future.result.body->size());
  future.place = finished_.insert(finished_.end(), id);
  for (const auto& [number, waiter] : std::exchange(future.waiters, {}))
    send(id, future, waiter.metadata_suffices, waiter.respond);
  make_room();
}

void Futures::send(const std::string& id, Future& future, bool metadata_suffices, const Respond& respond) {
  const FutureResult& result = future.result;
  if (metadata_suffices && result.is_protobuf && result.body->size() > kInlineBytes)
    return respond(json_answer(200, {{"status", "complete_metadata"},
                                     {"response_payload_size", static_cast<std::int64_t>(result.body->size())}}));
  let_go(id);  // the answer may be lost on its way, so a client may ask for it again
  respond({200, result.is_protobuf ? "application/x-protobuf" : "application/json", result.body});
}

void Futures::let_go(const std::string& id) {
  const auto found = futures_.find(id);
  if (found == futures_.end() || found->second.expiry) return;
  found->second.expiry = server_.after(kKeptSeconds, [this, id] { drop(id); });
}

void Futures::poll(const std::string& id, bool metadata_suffices, Respond respond) {
  const auto found = futures_.find(id);
  if (found == futures_.end())
    return respond(json_answer(
        410, {{"detail", "unknown request " + id + ": the server was restarted, or the result has been dropped"}}));
  if (found->second.done) return send(id, found->second, metadata_suffices, respond);
  const std::int64_t number = next_waiter_++;
  auto timer = server_.after(poll_seconds_, [this, id, number] {
    const auto waiting = futures_.find(id);
    if (waiting == futures_.end()) return;
    const auto waiter = waiting->second.waiters.find(number);
    if (waiter == waiting->second.waiters.end()) return;
    const Respond give_up = std::move(waiter->second.respond);
    const std::shared_ptr<void> running = std::move(waiter->second.timer);  // this very timer
    waiting->second.waiters.erase(waiter);
    const std::string reason = reason_ ? reason_(id) : "";
    Json json{
        {"type", "try_again"}, {"request_id", id}, {"queue_state", reason.empty() ? "active" : "paused_capacity"}};
    if (!reason.empty()) json["queue_state_reason"] = reason;
    give_up(json_answer(408, json));
  });
  found->second.waiters.emplace(number, Waiter{std::move(respond), metadata_suffices, std::move(timer)});
}

void Futures::drop(const std::string& id) {
  const auto found = futures_.find(id);
  if (found == futures_.end()) return;
  Future& future = found->second;
  if (future.done) {
    held_bytes_ -= static_cast<std::int64_t>(future.result.body->size());
    finished_.erase(future.place);
  } else {
    --unfinished_;
  }
  const Future last = std::move(future);
  futures_.erase(found);
  for (const auto& [number, waiter] : last.waiters)
    waiter.respond(json_answer(410, {{"detail", "request " + id + " was dropped"}}));
}

// The newest result stays whatever its size: its client has not had a chance yet.
void Futures::make_room() {
  while ((held_bytes_ > most_bytes_ || finished_.size() > kMostKept) && finished_.size() > 1)
    drop(std::string(finished_.front()));
}

}  // namespace espalier::serve
