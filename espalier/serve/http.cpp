// The only file that sees Boost, whose headers take a quarter of a minute to compile.
#include "espalier/serve/http.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/http/file_body.hpp>

#include "espalier/base/error.h"

namespace espalier::serve {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using Tcp = asio::ip::tcp;
using Failure = boost::system::error_code;

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [known, value] : headers)
    if (known == name) return value;
  return {};
}

class HttpServer::State {
 public:
  State(const HttpLimits& limits, Doorman doorman, Handler handler)
      : limits_(limits), doorman_(std::move(doorman)), handler_(std::move(handler)), acceptor_(context_) {}

  void listen(const std::string& host, int port);
  void accept();

  HttpLimits limits_;
  Doorman doorman_;
  Handler handler_;
  std::int64_t connections_ = 0, bodies_bytes_ = 0;
  asio::io_context context_{1};  // its end is that of the connections, which count themselves
  Tcp::acceptor acceptor_;
};

namespace {

// After an answer of 429 a client waits so long.
constexpr const char* kRetrySeconds = "1";
// The rest of a request that was refused is read for so long.
constexpr int kRestSeconds = 10;

HttpAnswer failure(int status, const char* detail) {
  return {status, "application/json",
          std::make_shared<const std::string>(std::string(R"({"detail": ")") + detail + "\"}")};
}

// One connection: it reads a request, waits for its answer, writes it, and reads the next.
template <class Server>
class Connection : public std::enable_shared_from_this<Connection<Server>> {
 public:
  Connection(Tcp::socket socket, Server* server) : stream_(std::move(socket)), server_(server) {
    ++server_->connections_;
  }
  ~Connection() {
    --server_->connections_;
    give_back_body();
  }

  void read(std::int64_t seconds) {
    parser_.emplace();
    parser_->header_limit(64 << 10);
    parser_->body_limit(static_cast<std::uint64_t>(server_->limits_.body_bytes));
    request_ = {};
    stream_.expires_after(std::chrono::seconds(seconds));
    http::async_read_header(stream_, buffer_, *parser_, [self = this->shared_from_this()](Failure failed, std::size_t) {
      self->take_head(failed);
    });
  }

 private:
  void take_head(Failure failed) {
    if (failed == http::error::end_of_stream || failed == boost::beast::error::timeout) return close();
    if (failed == http::error::body_limit) return refuse(failure(413, "the body is larger than this server takes"));
    if (failed) return refuse(failure(400, "not an HTTP request"));
    const auto& head = parser_->get();
    request_.method = std::string(head.method_string());
    const std::string_view target(head.target().data(), head.target().size());
    request_.path = target.substr(0, target.find('?'));
    if (request_.path.size() < target.size()) request_.query = target.substr(request_.path.size() + 1);
    for (const auto& field : head) {
      std::string name(field.name_string());
      for (char& c : name)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
      request_.headers.emplace_back(std::move(name), std::string(field.value()));
    }
    if (std::optional<HttpAnswer> refused = server_->doorman_(request_)) return refuse(std::move(*refused));
    if (!take_body_room()) return refuse(failure(429, "the server is reading as many requests as it may: try again"));
    if (request_.header("expect") == "100-continue") return invite_body();
    read_body();
  }

  // A body without a length may be as large as the limit.
  bool take_body_room() {
    const auto length = parser_->content_length();
    const std::int64_t bytes = length               ? static_cast<std::int64_t>(*length)
                               : parser_->is_done() ? 0
                                                    : server_->limits_.body_bytes;
    if (server_->bodies_bytes_ + bytes > server_->limits_.bodies_bytes) return false;
    body_room_ = bytes;
    server_->bodies_bytes_ += bytes;
    return true;
  }
  void give_back_body() {
    server_->bodies_bytes_ -= body_room_;
    body_room_ = 0;
  }

  void invite_body() {
    answer_.emplace(http::status::continue_, 11);
    send(*answer_, [self = this] { self->read_body(); });
  }

  void read_body() {
    stream_.expires_after(std::chrono::seconds(server_->limits_.body_seconds));
    http::async_read(stream_, buffer_, *parser_,
                     [self = this->shared_from_this()](Failure failed, std::size_t) { self->take_body(failed); });
  }

  void take_body(Failure failed) {
    if (failed == http::error::body_limit) return refuse(failure(413, "the body is larger than this server takes"));
    if (failed) return close();
    stream_.expires_never();
    keep_alive_ = parser_->get().keep_alive();
    request_.body = std::move(parser_->get().body());
    give_back_body();
    auto once = std::make_shared<bool>(false);
    server_->handler_(std::move(request_), [self = this->shared_from_this(), once](HttpAnswer answer) {
      if (!std::exchange(*once, true)) self->write(std::move(answer));
    });
  }

  // The rest of the request is of no use, so the connection ends.
  void refuse(HttpAnswer answer) {
    keep_alive_ = false, has_rest_ = true;
    write(std::move(answer));
  }

  // A client reads its answer after it has sent all. A connection that ends before would be reset, and the answer lost.
  void drop_rest() {
    close();
    rest_.resize(64 << 10);
    stream_.expires_after(std::chrono::seconds(kRestSeconds));
    drop_some();
  }
  void drop_some() {
    stream_.async_read_some(asio::buffer(rest_), [self = this->shared_from_this()](Failure failed, std::size_t) {
      if (!failed) self->drop_some();
    });
  }

  void write(HttpAnswer answer) {
    if (!answer.file.empty()) return write_file(answer);
    body_ = answer.body ? std::move(answer.body) : std::make_shared<const std::string>();
    answer_.emplace(static_cast<http::status>(answer.status), 11);
    answer_->set(http::field::content_type, answer.type);
    for (const auto& [name, value] : answer.headers) answer_->set(name, value);
    if (answer.status == 429) answer_->set(http::field::retry_after, kRetrySeconds);
    answer_->keep_alive(keep_alive_);
    answer_->body() = {body_->data(), body_->size()};
    answer_->prepare_payload();
    send_last(*answer_);
  }

  void write_file(const HttpAnswer& answer) {
    Failure failed;
    boost::beast::file_posix file;
    file.open(answer.file.c_str(), boost::beast::file_mode::scan, failed);
    if (failed) return write(failure(404, "there is no such file"));
    file_.emplace(http::status::ok, 11);
    file_->set(http::field::content_type, answer.type);
    file_->keep_alive(keep_alive_);
    file_->body().reset(std::move(file), failed);
    file_->prepare_payload();
    send_last(*file_);
  }

  void send_last(auto& message) {
    send(message, [self = this] {
      self->body_.reset();
      self->answer_.reset(), self->file_.reset();
      if (!self->keep_alive_) return self->has_rest_ ? self->drop_rest() : self->close();
      self->read(self->server_->limits_.idle_seconds);
    });
  }

  // One type of `then` for all: each further one is seconds of the compiler.
  template <class Message>
  void send(Message& message, std::function<void()> then) {
    stream_.expires_after(std::chrono::seconds(server_->limits_.body_seconds));
    http::async_write(stream_, message,
                      [self = this->shared_from_this(), then = std::move(then)](Failure failed, std::size_t) {
                        failed ? self->close() : then();
                      });
  }

  void close() {
    Failure ignored;
    stream_.socket().shutdown(Tcp::socket::shutdown_send, ignored);
  }

  boost::beast::tcp_stream stream_;
  Server* server_;
  boost::beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  HttpRequest request_;
  std::int64_t body_room_ = 0;
  bool keep_alive_ = false, has_rest_ = false;
  std::vector<char> rest_;
  std::shared_ptr<const std::string> body_;  // lives until it is written
  std::optional<http::response<http::span_body<const char>>> answer_;
  std::optional<http::response<http::basic_file_body<boost::beast::file_posix>>> file_;
};

}  // namespace

void HttpServer::State::listen(const std::string& host, int port) {
  const std::string where = host + ":" + std::to_string(port);
  const auto require = [&](const Failure& failed) {
    if (failed)
      throw OptionError({"--host, --port", "an address to listen at", where + ": " + failed.message(),
                         "is another server running there?"});
  };
  Failure failed;
  Tcp::resolver resolver(context_);
  const auto found = resolver.resolve(host, std::to_string(port), Tcp::resolver::passive, failed);
  require(failed);
  const Tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), failed);
  require(failed);
  acceptor_.set_option(asio::socket_base::reuse_address(true), failed);
  acceptor_.bind(endpoint, failed);
  require(failed);
  acceptor_.listen(4096, failed);
  require(failed);
}

void HttpServer::State::accept() {
  acceptor_.async_accept([this](Failure failed, Tcp::socket socket) {
    if (failed == asio::error::operation_aborted) return;
    if (!failed && connections_ < limits_.connections) {
      Failure ignored;
      socket.set_option(Tcp::no_delay(true), ignored);
      std::make_shared<Connection<State>>(std::move(socket), this)->read(limits_.head_seconds);
    }
    // Without a free descriptor every attempt fails at once: the next one waits for other connections to end.
    if (failed) {
      auto timer = std::make_shared<asio::steady_timer>(context_, std::chrono::milliseconds(100));
      timer->async_wait([this, timer](Failure) { accept(); });
      return;
    }
    accept();
  });
}

HttpServer::HttpServer(const std::string& host, int port, const HttpLimits& limits, Doorman doorman, Handler handler)
    : state_(std::make_unique<State>(limits, std::move(doorman), std::move(handler))) {
  state_->listen(host, port);
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return state_->acceptor_.local_endpoint().port(); }
std::int64_t HttpServer::connections() const { return state_->connections_; }

void HttpServer::run() {
  state_->accept();
  state_->context_.run();
}

void HttpServer::stop() { state_->context_.stop(); }

void HttpServer::post(std::function<void()> work) { asio::post(state_->context_, std::move(work)); }

std::shared_ptr<void> HttpServer::after(double seconds, std::function<void()> work) {
  auto timer = std::make_shared<asio::steady_timer>(
      state_->context_, std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6)));
  // The handle alone keeps the timer: when it dies, the wait is aborted.
  timer->async_wait([work = std::move(work)](Failure failed) {
    if (!failed) work();
  });
  return timer;
}

}  // namespace espalier::serve
