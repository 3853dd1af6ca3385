// Lines of work on the engine's thread.
#include "espalier/serve/engine_thread.h"

#include <gtest/gtest.h>

#include <future>
#include <vector>

namespace espalier::serve {
namespace {

TEST(EngineThread, LinesTakeTurnsAndKeepTheirOrder) {
  std::vector<std::string> ran;
  std::promise<void> go, done;
  {
    EngineThread thread([] {});
    thread.add("z", [&] { go.get_future().wait(); });  // everything below waits behind it
    for (int i = 0; i < 3; ++i) thread.add("a", [&, i] { ran.push_back("a" + std::to_string(i)); });
    for (int i = 0; i < 2; ++i) thread.add("b", [&, i] { ran.push_back("b" + std::to_string(i)); });
    thread.add("c", [&] { ran.push_back("c0"); });
    EXPECT_GE(thread.waiting(), 6);
    thread.add("a", [&] { done.set_value(); });
    go.set_value();
    done.get_future().wait();
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"a0", "b0", "c0", "a1", "b1", "a2"}));
}

TEST(EngineThread, WhatBeginsItRunsFirst) {
  std::vector<int> ran;
  std::promise<void> done;
  EngineThread thread([&] { ran.push_back(0); });
  thread.add("a", [&] {
    ran.push_back(1);
    done.set_value();
  });
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace espalier::serve
