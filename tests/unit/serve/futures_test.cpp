// Futures that are polled for, on the thread of a server.
#include "espalier/serve/futures.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "espalier/base/json.h"

namespace espalier::serve {
namespace {

// Runs `test` on the thread of a server, which goes on until it calls `stop`.
void on_server(std::int64_t result_bytes, double poll_seconds,
               const std::function<void(HttpServer& server, Futures& futures)>& test) {
  HttpServer server(
      "127.0.0.1", 0, {}, [](const HttpRequest&) { return std::nullopt; }, [](HttpRequest, const Respond&) {});
  Futures futures(server, result_bytes, poll_seconds);
  server.post([&] { test(server, futures); });
  server.run();
}

TEST(Futures, APollSaysWhyTheRequestWaits) {
  std::string reason = "the engine works for another client";
  std::vector<HttpAnswer> answers;
  on_server(1000, 0.01, [&](HttpServer& server, Futures& futures) {
    futures.set_waiting_reason([&](const std::string& id) { return id == "waits" ? reason : ""; });
    futures.open("waits");
    futures.open("runs");
    const auto keep = [&](HttpAnswer answer) {
      answers.push_back(std::move(answer));
      if (answers.size() == 2) server.stop();
    };
    futures.poll("waits", false, keep);
    futures.poll("runs", false, keep);
  });
  ASSERT_EQ(answers.size(), 2u);
  const Json waits = Json::parse(*answers[0].body), runs = Json::parse(*answers[1].body);
  EXPECT_EQ(answers[0].status, 408);
  EXPECT_EQ(waits, (Json{{"type", "try_again"},
                         {"request_id", "waits"},
                         {"queue_state", "paused_capacity"},
                         {"queue_state_reason", reason}}));
  EXPECT_EQ(answers[1].status, 408);
  EXPECT_EQ(runs, (Json{{"type", "try_again"}, {"request_id", "runs"}, {"queue_state", "active"}}));
}

TEST(Futures, AWaitingPollGetsTheResultAtOnceAndALaterOneAgain) {
  std::vector<HttpAnswer> answers;
  on_server(1000, 60, [&](HttpServer& server, Futures& futures) {
    const auto keep = [&](HttpAnswer answer) { answers.push_back(std::move(answer)); };
    futures.open("one");
    futures.poll("one", false, keep);
    EXPECT_EQ(futures.unfinished(), 1);
    futures.finish("one", json_result("1"));
    futures.finish("one", json_result("2"));  // the first result counts
    futures.poll("one", false, keep);
    futures.poll("never opened", false, keep);
    futures.open("two");
    futures.poll("two", false, keep);
    futures.drop("two");
    futures.drop("one");
    EXPECT_EQ(futures.unfinished(), 0);
    EXPECT_EQ(futures.held_bytes(), 0);
    server.stop();
  });
  ASSERT_EQ(answers.size(), 4u);
  EXPECT_EQ(*answers[0].body, "1");
  EXPECT_EQ(*answers[1].body, "1");
  EXPECT_EQ(answers[2].status, 410);
  EXPECT_EQ(answers[3].status, 410);
}

TEST(Futures, TheOldestResultsGoWhereTheyTakeTooManyBytes) {
  on_server(10, 60, [&](HttpServer& server, Futures& futures) {
    for (const char* id : {"a", "b", "c"}) futures.open(id);
    futures.finish("a", json_result("123456"));
    futures.finish("b", json_result("1234"));
    EXPECT_TRUE(futures.has("a"));
    futures.finish("c", json_result("12345678901234567890"));
    EXPECT_FALSE(futures.has("a") || futures.has("b"));
    EXPECT_TRUE(futures.is_done("c"));  // whatever its size: its client has not had a chance yet
    server.stop();
  });
}

}  // namespace
}  // namespace espalier::serve
