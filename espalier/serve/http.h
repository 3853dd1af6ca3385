// HTTP as the service sees it: a request with its whole body, an answer, and a server on one thread.
//
// The server holds many waiting requests at once: a request costs its connection's memory until it is answered. It
// speaks HTTP/1.1 without TLS, which a proxy may add.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier::serve {

struct HttpRequest {
  std::string method, path, query;                           // path without the query, as sent
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;

  std::string_view header(std::string_view name) const;  // empty: none
};

struct HttpAnswer {
  int status = 200;
  std::string type = "application/json";
  std::shared_ptr<const std::string> body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};  // beside content-type and content-length
  std::string file = {};                                          // path of a file that is sent in place of the body
};

// To be called once, on the server's thread. A copy refers to the same request. It must die before the server.
using Respond = std::function<void(HttpAnswer)>;

struct HttpLimits {
  std::int64_t body_bytes = std::int64_t{256} << 20;   // of one request, as sent
  std::int64_t bodies_bytes = std::int64_t{2} << 30;   // of all requests that are being read; more get 429
  std::int64_t connections = 16384;                    // more are closed
  std::int64_t head_seconds = 60, body_seconds = 300;  // longest time to send a request's head; its body
  std::int64_t idle_seconds = 600;                     // longest time between two requests
};

class HttpServer {
 public:
  using Handler = std::function<void(HttpRequest, Respond)>;
  // Sees a request without its body: an answer refuses it.
  using Doorman = std::function<std::optional<HttpAnswer>(const HttpRequest&)>;

  // Listens at once. Port 0: any free one. Errors: OptionError for an address that cannot be had.
  HttpServer(const std::string& host, int port, const HttpLimits& limits, Doorman doorman, Handler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  // Accepts connections and runs all that is posted, on this thread, until stop().
  void run();
  void stop();  // any thread
  // Runs `work` on the server's thread. Any thread may call it.
  void post(std::function<void()> work);
  // Runs `work` on the server's thread after a time, unless the returned object dies before. Server's thread only.
  std::shared_ptr<void> after(double seconds, std::function<void()> work);
  std::int64_t connections() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier::serve
