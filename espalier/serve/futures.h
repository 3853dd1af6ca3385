// Results that clients wait for: a request is answered at once with the name of its future, and polled for later.
//
// A poll of an unfinished future is held for kPollSeconds and then answered 408, upon which the SDK polls again at
// once. A finished result is kept until it was fetched and kKeptSeconds longer, while the bytes of all allow it.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "espalier/serve/http.h"

namespace espalier::serve {

inline constexpr double kPollSeconds = 30, kKeptSeconds = 600;
inline constexpr std::size_t kMostKept = std::size_t{1} << 20;  // finished results, however small
// Larger results are announced before they are sent, where the client allows it.
inline constexpr std::size_t kInlineBytes = std::size_t{4} << 20;

// A finished future: a result or an error, as it is sent.
struct FutureResult {
  bool is_protobuf = false;  // else JSON
  bool failed = false;
  std::shared_ptr<const std::string> body;
};
FutureResult json_result(const std::string& text);
FutureResult protobuf_result(std::string bytes);
// `category`: "user" or "server", whose mistake it is.
FutureResult error_result(const std::string& text, const char* category);

class Futures {
 public:
  // `result_bytes`: of all finished results that are kept, before the oldest are dropped.
  Futures(HttpServer& server, std::int64_t result_bytes, double poll_seconds = kPollSeconds)
      : server_(server), most_bytes_(result_bytes), poll_seconds_(poll_seconds) {}

  void open(const std::string& id);
  bool has(const std::string& id) const { return futures_.contains(id); }
  bool is_done(const std::string& id) const;
  // Once for each future. The first result counts.
  void finish(const std::string& id, FutureResult result);
  // Why unfinished futures wait: shown by the SDK. Empty: they are being computed.
  void set_waiting_reason(std::function<std::string(const std::string& id)> reason) { reason_ = std::move(reason); }
  // Answers `respond` with the result, or 408, or 410 for a future that is not known.
  void poll(const std::string& id, bool metadata_suffices, Respond respond);
  // Drops a finished future kKeptSeconds from now, although nobody has fetched it.
  void let_go(const std::string& id);
  void drop(const std::string& id);

  std::int64_t count() const { return static_cast<std::int64_t>(futures_.size()); }
  std::int64_t unfinished() const { return unfinished_; }
  std::int64_t held_bytes() const { return held_bytes_; }

 private:
  struct Waiter {
    Respond respond;
    bool metadata_suffices;
    std::shared_ptr<void> timer;
  };
  struct Future {
    bool done = false;
    FutureResult result;
    std::map<std::int64_t, Waiter> waiters;
    std::shared_ptr<void> expiry;            // runs once the result was fetched
    std::list<std::string>::iterator place;  // among the finished ones
  };
  void send(const std::string& id, Future& future, bool metadata_suffices, const Respond& respond);
  void make_room();

  HttpServer& server_;
  std::map<std::string, Future> futures_;
  std::list<std::string> finished_;  // the oldest first
  std::function<std::string(const std::string&)> reason_;
  std::int64_t most_bytes_;
  double poll_seconds_;
  std::int64_t held_bytes_ = 0, unfinished_ = 0, next_waiter_ = 0;
};

}  // namespace espalier::serve
