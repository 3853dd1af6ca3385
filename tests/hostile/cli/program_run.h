// Runs the program with its streams caught.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace espalier::testing {

struct Outcome {
  int code = -1;  // exit code; -1: ended by a signal
  int signal = 0;
  std::string out, err;
};

// Where the standard output goes: a file that is read at the end, a full disk, or a pipe whose reader has left.
enum class Output { caught, full_disk, closed_pipe };

// The built file under way in the folder `where`; `input` is what stands on its standard input.
class Started {
 public:
  Started(const std::filesystem::path& where, const std::vector<std::string>& words, Output output = Output::caught,
          bool ignores_broken_pipes = false, const std::string& input = "/dev/null");
  // A copy of this process that runs there, its streams as above.
  Started(const std::filesystem::path& where, pid_t copy) : pid_(copy), where_(where) {}
  pid_t pid() const { return pid_; }
  Outcome wait();  // at most once

 private:
  pid_t pid_;
  std::filesystem::path where_;
};

// The program's function in a copy of this process, which saves what the start of torch's library takes.
Outcome run(const std::filesystem::path& where, const std::vector<std::string>& words);

// A folder for one test, removed at its end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string put(const std::string& name, const std::string& text) const;  // the file's path
  std::string read(const std::string& name) const;
  std::vector<std::string> names() const;  // of what lies in it, hidden files too, without the caught streams

 private:
  std::filesystem::path path_;
};

}  // namespace espalier::testing
