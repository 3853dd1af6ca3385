// main of every GoogleTest binary. The report of a test has its seconds of processors, which other work beside it
// hardly changes. Under `make record` (tests/recording/entered_functions.cpp is preloaded then) it says when a test
// ends, so that what the process came to since the last one is noted under its name.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

namespace {

using Note = void (*)(const char* test);

class NotesWhatWasEntered : public testing::EmptyTestEventListener {
 public:
  explicit NotesWhatWasEntered(Note note) : note_(note) {}
  void OnTestEnd(const testing::TestInfo& test) override {
    note_((std::string(test.test_suite_name()) + '.' + test.name()).c_str());
  }

 private:
  Note note_;
};

// The seconds that this process and its ended children have spent.
double processor_seconds() {
  double seconds = 0;
  for (const int whose : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(whose, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime})
      seconds += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  }
  return seconds;
}

class RecordsProcessorSeconds : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo&) override { start_ = processor_seconds(); }
  void OnTestEnd(const testing::TestInfo&) override {
    testing::Test::RecordProperty("processor_seconds", std::to_string(processor_seconds() - start_));
  }

 private:
  double start_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new RecordsProcessorSeconds);
  if (const auto note = reinterpret_cast<Note>(dlsym(RTLD_DEFAULT, "espalier_note_entered")); note != nullptr)
    testing::UnitTest::GetInstance()->listeners().Append(new NotesWhatWasEntered(note));
  return RUN_ALL_TESTS();
}
