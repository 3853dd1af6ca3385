// main of every GoogleTest binary. Under `make record` (tests/recording/entered_functions.cpp is preloaded then) it
// says when a test ends, so that what the process came to since the last one is noted under its name.
#include <dlfcn.h>
#include <gtest/gtest.h>

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

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const auto note = reinterpret_cast<Note>(dlsym(RTLD_DEFAULT, "espalier_note_entered")); note != nullptr)
    testing::UnitTest::GetInstance()->listeners().Append(new NotesWhatWasEntered(note));
  return RUN_ALL_TESTS();
}
