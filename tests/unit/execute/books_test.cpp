// The seconds, peak and bytes of a step are booked under its phase.
#include "espalier/execute/books.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/in_process.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

const Step kTrunkForward{.pass = Pass::forward, .kind = ItemKind::trunk};
const Step kTrunkBackward{.pass = Pass::backward, .kind = ItemKind::trunk};
const Step kWaveForward{.pass = Pass::forward, .kind = ItemKind::wave};
const Step kWaveBackward{.pass = Pass::backward, .kind = ItemKind::wave};

void wait() { std::this_thread::sleep_for(std::chrono::milliseconds(3)); }

class Booked {
 public:
  explicit Booked(const Mesh& mesh = mesh_of_one()) : step_(nested_trunks(), mesh) {}

  void book(const Step& step, const std::function<void()>& work) { books_.book(step, work); }
  const RunResult& finish() {
    books_.finish();
    return result_;
  }
  Arena& arena() { return step_.arena; }
  Arena& add_region() {
    regions_.push_back(std::make_unique<Arena>(std::int64_t{1} << 24, cpu_device()));
    return *regions_.back();
  }

 private:
  SmallStep step_;
  StepPath path_{step_.model->decoder, step_.plan, true, step_.arena, ""};
  StepRun run_{step_.model->decoder, step_.rollouts, *path_, step_.arena, nullptr, &step_.gradients};
  std::vector<std::unique_ptr<Arena>> regions_;
  RunResult result_;
  Books books_{run_, regions_, result_};
};

TEST(Books, SecondsAreThoseOfThePhase) {
  for (const Step& step : {kTrunkForward, kWaveForward, kWaveBackward, kTrunkBackward}) {
    Booked booked;
    booked.book(step, wait);
    const PhaseSeconds seconds = booked.finish().seconds;
    const bool wave = step.kind == ItemKind::wave, forward = step.pass == Pass::forward;
    const double own = wave ? seconds.waves : forward ? seconds.trunk_forward : seconds.trunk_backward;
    EXPECT_GE(own, 3e-3);
    EXPECT_EQ(seconds.trunk_forward + seconds.waves + seconds.trunk_backward, own) << "and of no other";
  }
}

TEST(Books, APeakIsTheMostOfItsPhaseWithWavesInFlight) {
  Booked booked;
  Arena& region = booked.add_region();
  const std::int64_t base = booked.arena().in_use();
  const auto take = [](Arena& arena, std::int64_t numbers) {
    const ArenaScope scope(arena);
    arena.take({numbers}, at::kDouble);
    return arena.in_use();
  };
  std::int64_t small = 0, large = 0, of_region = 0;
  booked.book(kTrunkForward, [&] { small = take(booked.arena(), 1000); });
  booked.book(kTrunkBackward, [&] { large = take(booked.arena(), 5000); });
  booked.book(kTrunkBackward, [&] { take(booked.arena(), 10); });
  const ArenaScope in_flight(region);
  region.take({2000}, at::kDouble);
  of_region = region.in_use();
  booked.book(kWaveForward, [&] { take(booked.arena(), 1000); });
  const PhasePeaks peaks = booked.finish().arena_bytes;
  EXPECT_GT(small, base);
  EXPECT_EQ(peaks.a, small);
  EXPECT_EQ(peaks.c, large) << "the larger of two";
  EXPECT_EQ(peaks.b, small + of_region);
}

TEST(Books, BytesAreThoseThatTheRankGaveInThePhase) {
  run_ranks({.dp = 2}, [](const Mesh& mesh) {
    Booked booked(mesh);
    const at::Tensor numbers = at::ones({100}, at::kDouble);
    mesh.dp.add_over_ranks(numbers);  // before: of nobody
    booked.book(kTrunkForward, [&] { mesh.dp.add_over_ranks(numbers); });
    booked.book(kWaveBackward, [&] {
      mesh.dp.add_over_ranks(numbers);
      mesh.dp.add_over_ranks(numbers);
    });
    const TrafficBytes bytes = booked.finish().bytes;
    EXPECT_EQ(bytes.a.dp, 800);
    EXPECT_EQ(bytes.b.dp, 1600);
    EXPECT_EQ(bytes.c.dp, 0);
  });
}

}  // namespace
}  // namespace espalier::testing
