// kill -9 at random moments of saving: the directory is always one complete version.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "tests/hostile/checkpoint/save_version.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

// The version in a directory; fails the test unless weights, masters and moments all belong to it.
std::int64_t loaded_version(const fs::path& directory) {
  const ModelShape shape = saved_shape();
  const ParameterTable table(shape);
  std::vector<float> weights(static_cast<std::size_t>(table.size())), masters(weights.size()), first(weights.size()),
      second(weights.size());
  load_parameters(directory, table, DType::float32, weights.data());
  const RunState state = load_run_state(directory, fingerprint_of(shape), table, DType::float32, masters.data(),
                                        first.data(), second.data());
  const std::vector<float> expected(weights.size(), static_cast<float>(state.step));
  EXPECT_TRUE(weights == expected && masters == expected && first == expected && second == expected)
      << "version " << state.step << " is mixed with another";
  EXPECT_EQ(read_text(directory / "config.json"), "{}");
  return state.step;
}

// Waits until the directory holds a later version than `last`; false after a minute.
bool advances_beyond(std::int64_t last, const fs::path& directory) {
  for (int attempt = 0; attempt < 60'000; ++attempt) {
    try {
      if (read_run_state(directory).step > last) return true;
    } catch (const InputError&) {
      // The old directory was removed between opening it and opening its file.
    }
    ::usleep(1000);
  }
  return false;
}

TEST(KilledWhileSaving, TheLastCompleteVersionAlwaysLoads) {
  constexpr int kRounds = 40;
  constexpr unsigned kSeed = 20250101;
  SCOPED_TRACE(text_of("seed ", kSeed));
  std::mt19937 random(kSeed);
  const TemporaryDirectory folder;
  fs::create_directory(folder / "source");
  write_text(folder / "source" / "config.json", "{}");
  const std::string source = folder / "source", target = folder / "out";
  const auto begin = std::chrono::steady_clock::now();
  save_version(source, target, 0);
  const auto save_time =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
  std::uniform_int_distribution<useconds_t> delay(0, static_cast<useconds_t>(2 * save_time.count() + 1000));

  std::int64_t last = 0;
  int killed_while_writing = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string first = std::to_string(last + 1);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::execl(ESPALIER_SAVE_LOOP, ESPALIER_SAVE_LOOP, source.c_str(), target.c_str(), first.c_str(), nullptr);
      ::_exit(127);
    }
    // Every other kill falls into a later save, whatever the machine needs to start a program.
    const bool advanced = round % 2 == 0 || advances_beyond(last, target);
    ::usleep(delay(random));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the saving program ended by itself: " << WEXITSTATUS(status);
    ASSERT_TRUE(advanced) << "the saving program saved nothing in a minute";
    killed_while_writing += entries_in(folder.path()) > 2 ? 1 : 0;
    const std::int64_t version = loaded_version(target);
    ASSERT_GE(version, last) << "a saved version was lost";
    last = version;
  }
  EXPECT_GE(last, kRounds / 2);
  EXPECT_GT(killed_while_writing, 0) << "no kill ever hit a save";
  check_output_directory(target);  // what the next run does first
  EXPECT_EQ(entries_in(folder.path()), 2u) << "leftovers remain";
  EXPECT_EQ(loaded_version(target), last);
}

}  // namespace
}  // namespace espalier::test
