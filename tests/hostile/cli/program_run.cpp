#include "tests/hostile/cli/program_run.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "tests/hostile/cli/program_copy.h"

namespace espalier::testing {
namespace {

constexpr const char* kOut = ".caught-out";
constexpr const char* kErr = ".caught-err";

std::string content(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

int open_output(const std::filesystem::path& caught, Output output) {
  if (output == Output::full_disk) return open("/dev/full", O_WRONLY);
  if (output == Output::caught) return open(caught.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  int ends[2];
  if (pipe(ends) != 0) return -1;
  close(ends[0]);
  return ends[1];
}

// A copy of this process in the folder, with its streams; `become` does not come back.
template <class Become>
pid_t start_copy(const std::filesystem::path& where, int out_file, const std::string& input, const Become& become) {
  std::fflush(nullptr);  // what waits here to be written is not the copy's
  const pid_t pid = fork();
  if (pid != 0) {
    close(out_file);
    return pid;
  }
  const int err_file = open((where / kErr).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  enter_copy(where.string(), open((where / input).c_str(), O_RDONLY), out_file, err_file);
  become();
  _exit(127);
}

}  // namespace

Started::Started(const std::filesystem::path& where, const std::vector<std::string>& words, Output output,
                 bool ignores_broken_pipes, const std::string& input)
    : where_(where) {
  std::vector<char*> argv = {const_cast<char*>("espalier")};
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_ = start_copy(where, open_output(where / kOut, output), input, [&] {
    if (ignores_broken_pipes) signal(SIGPIPE, SIG_IGN);
    execv(ESPALIER_PROGRAM, argv.data());
  });
}

Outcome Started::wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  Outcome outcome;
  if (WIFEXITED(status))
    outcome.code = WEXITSTATUS(status);
  else
    outcome.signal = WTERMSIG(status);
  outcome.out = content(where_ / kOut);
  outcome.err = content(where_ / kErr);
  return outcome;
}

Outcome run(const std::filesystem::path& where, const std::vector<std::string>& words) {
  const auto become = [&] { become_the_program(words); };
  return Started(where, start_copy(where, open_output(where / kOut, Output::caught), "/dev/null", become)).wait();
}

Folder::Folder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "espalier_cli_XXXXXX").string();
  path_ = mkdtemp(pattern.data());
}

Folder::~Folder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

std::string Folder::put(const std::string& name, const std::string& text) const {
  std::filesystem::create_directories((path_ / name).parent_path());
  std::ofstream(path_ / name, std::ios::binary) << text;
  return (path_ / name).string();
}

std::string Folder::read(const std::string& name) const { return content(path_ / name); }

std::vector<std::string> Folder::names() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    if (name != kOut && name != kErr) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace espalier::testing
