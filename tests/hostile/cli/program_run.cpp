#include "tests/hostile/cli/program_run.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

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

}  // namespace

Started::Started(const std::filesystem::path& where, const std::vector<std::string>& words, Output output,
                 bool ignores_broken_pipes, const std::string& input)
    : out_(where / kOut), err_(where / kErr) {
  std::vector<char*> argv = {const_cast<char*>("espalier")};
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  const int out_file = open_output(out_, output);
  const int err_file = open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (out_file < 0 || err_file < 0 || chdir(where.c_str()) != 0) _exit(126);
  signal(SIGPIPE, ignores_broken_pipes ? SIG_IGN : SIG_DFL);
  // A test run that a script started in the background ignores interrupts, and its children would.
  for (const int interrupt : {SIGINT, SIGTERM, SIGHUP}) signal(interrupt, SIG_DFL);
  dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
  dup2(out_file, STDOUT_FILENO);
  dup2(err_file, STDERR_FILENO);
  execv(ESPALIER_PROGRAM, argv.data());
  _exit(127);
}

Outcome Started::wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  Outcome outcome;
  if (WIFEXITED(status))
    outcome.code = WEXITSTATUS(status);
  else
    outcome.signal = WTERMSIG(status);
  outcome.out = content(out_);
  outcome.err = content(err_);
  return outcome;
}

Outcome run(const std::filesystem::path& where, const std::vector<std::string>& words) {
  return Started(where, words).wait();
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
