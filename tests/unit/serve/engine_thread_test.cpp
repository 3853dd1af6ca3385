// Lines of work on the engine's thread.
#include "espalier/serve/engine_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

namespace espalier::serve {
namespace {

TEST(EngineThread, LinesTakeTurnsAndKeepTheirOrder) {
  std::vector<std::string> ran;
  std::promise<void> go, done;
  {
    EngineThread thread([] {}, [] { return false; });
    thread.add("z", [&] { go.get_future().wait(); });
    while (thread.running().empty()) std::this_thread::yield();  // everything below waits behind it
    for (int i = 0; i < 3; ++i) thread.add("a", [&, i] { ran.push_back("a" + std::to_string(i)); });
    for (int i = 0; i < 2; ++i) thread.add("b", [&, i] { ran.push_back("b" + std::to_string(i)); });
    thread.add("c", [&] { ran.push_back("c0"); });
    EXPECT_GE(thread.waiting(), 6);
    EXPECT_EQ(thread.running(), "z");
    thread.add("a", [&] { done.set_value(); });
    go.set_value();
    done.get_future().wait();
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"a0", "b0", "c0", "a1", "b1", "a2"}));
}

TEST(EngineThread, WhatBeginsItRunsFirst) {
  std::vector<int> ran;
  std::promise<void> done;
  EngineThread thread([&] { ran.push_back(0); }, [] { return false; });
  thread.add("a", [&] {
    ran.push_back(1);
    done.set_value();
  });
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<int>{0, 1}));
}

TEST(EngineThread, WorkBetweenUnitsGoesOnWhileThereIsSome) {
  int left = 0;
  std::vector<int> ran;
  std::promise<void> done;
  EngineThread thread([] {},
                      [&] {
                        if (left == 0) return false;
                        ran.push_back(left--);
                        if (left == 0) done.set_value();
                        return left > 0;
                      });
  thread.add("a", [&] { left = 3; });
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<int>{3, 2, 1}));
}

struct Number final : Unit {
  Number(int number, std::vector<std::vector<int>>& into) : numbers{number}, ran(into) {}
  void run() override { ran.push_back(numbers); }
  bool joins(const Unit& next) const override {
    const auto* other = dynamic_cast<const Number*>(&next);
    return other != nullptr && numbers.size() < 3 && other->numbers.front() == numbers.back() + 1;
  }
  void take(std::shared_ptr<Unit> next) override { numbers.push_back(static_cast<Number&>(*next).numbers.front()); }

  std::vector<int> numbers;
  std::vector<std::vector<int>>& ran;
};

TEST(EngineThread, UnitsThatWaitAreJoinedWhereTheyMay) {
  std::vector<std::vector<int>> ran;
  std::promise<void> go, done;
  EngineThread thread([] {}, [] { return false; });
  thread.add("z", [&] { go.get_future().wait(); });
  std::vector<std::shared_ptr<Unit>> units;
  for (const int number : {1, 2, 3, 4, 6}) units.push_back(std::make_shared<Number>(number, ran));
  thread.add("a", std::move(units));
  thread.add("a", [&] { done.set_value(); });
  go.set_value();
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<std::vector<int>>{{1, 2, 3}, {4}, {6}}));
  EXPECT_EQ(thread.waiting(), 0);
}

TEST(EngineThread, UnitsThatAreHeldAreJoinedAlthoughTheyComeOneByOne) {
  std::vector<std::vector<int>> ran;
  std::promise<void> done;
  EngineThread thread([] {}, [] { return false; });
  {
    const EngineThread::Hold hold(thread);
    for (const int number : {1, 2, 3}) {
      thread.add("a", {std::make_shared<Number>(number, ran)});
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the engine's thread could take it meanwhile
    }
  }
  thread.add("a", [&] { done.set_value(); });
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<std::vector<int>>{{1, 2, 3}}));
}

// A unit of `parts` parts, which pauses between them.
struct Parts final : Unit {
  Parts(EngineThread& engine, std::string its_name, int count, std::vector<std::string>& into)
      : thread(engine), name(std::move(its_name)), parts(count), ran(into) {}
  void run() override {
    for (int part = 0; part < parts; ++part) {
      if (part > 0) thread.pause();
      ran.push_back(name + std::to_string(part));
    }
  }
  bool pauses() const override { return true; }

  EngineThread& thread;
  std::string name;
  int parts;
  std::vector<std::string>& ran;
};

// Everything that is added from now on waits until `go` is set.
void hold_back(EngineThread& thread, std::promise<void>& go) {
  thread.add("z", [&] { go.get_future().wait(); });
  while (thread.running().empty()) std::this_thread::yield();
}

TEST(EngineThread, LongUnitsOfDifferentLinesRunInTurnsPartByPart) {
  std::vector<std::string> ran;
  std::promise<void> go, done;
  EngineThread thread([] {}, [] { return false; });
  hold_back(thread, go);
  thread.add("a", {std::make_shared<Parts>(thread, "a", 4, ran), std::make_shared<Parts>(thread, "A", 2, ran)});
  thread.add("b", {std::make_shared<Parts>(thread, "b", 2, ran)});
  thread.add("c", [&] { ran.emplace_back("c"); });
  thread.add("a", [&] { done.set_value(); });
  go.set_value();
  done.get_future().wait();
  // The second unit of line a begins after its first has ended.
  EXPECT_EQ(ran, (std::vector<std::string>{"a0", "b0", "c", "a1", "b1", "a2", "a3", "A0", "A1"}));
}

TEST(EngineThread, PlainWorkMayPause) {
  std::vector<std::string> ran;
  std::promise<void> go, done;
  EngineThread thread([] {}, [] { return false; });
  hold_back(thread, go);
  const auto work = [&] {
    for (const char* part : {"a0", "a1", "a2"}) {
      ran.emplace_back(part);
      thread.pause();
    }
    done.set_value();
  };
  thread.add("a", {EngineThread::unit(work, true)});
  thread.add("b", [&] { ran.emplace_back("b"); });
  go.set_value();
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<std::string>{"a0", "b", "a1", "a2"}));
}

TEST(EngineThread, SamplesAreDecodedBetweenTheParts) {
  std::vector<std::string> ran;
  std::promise<void> go, done;
  int left = 0;
  EngineThread thread([] {},
                      [&] {
                        if (left > 0) ran.push_back("sample" + std::to_string(left--));
                        return left > 0;
                      });
  hold_back(thread, go);
  thread.add("a", {std::make_shared<Parts>(thread, "a", 4, ran), EngineThread::unit([&] { done.set_value(); })});
  thread.add("samplers", [&] { left = 2; });
  go.set_value();
  done.get_future().wait();
  EXPECT_EQ(ran, (std::vector<std::string>{"a0", "sample2", "a1", "sample1", "a2", "a3"}));
}

TEST(EngineThread, AnEndUnwindsUnitsThatPause) {
  std::vector<std::string> ran;
  std::atomic<int> begun = 0;
  struct Guard {
    std::vector<std::string>& ran;
    ~Guard() { ran.emplace_back("unwound"); }
  };
  struct Endless final : Unit {
    void run() override {
      const Guard guard{*ran};
      ++*begun;
      for (;;) engine->load()->pause();
    }
    bool pauses() const override { return true; }
    std::atomic<EngineThread*>* engine = nullptr;
    std::vector<std::string>* ran = nullptr;
    std::atomic<int>* begun = nullptr;
  };
  std::atomic<EngineThread*> engine = nullptr;
  {
    EngineThread thread([] {}, [] { return false; });
    engine = &thread;
    std::vector<std::shared_ptr<Unit>> units;
    for (int i = 0; i < 2; ++i) {
      auto unit = std::make_shared<Endless>();
      unit->engine = &engine, unit->ran = &ran, unit->begun = &begun;
      thread.add("line" + std::to_string(i), {unit});
    }
    while (begun < 2) std::this_thread::yield();
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"unwound", "unwound"}));
}

}  // namespace
}  // namespace espalier::serve
