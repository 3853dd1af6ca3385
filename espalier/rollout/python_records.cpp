#include "espalier/rollout/python_records.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <simdjson.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/rollout/python_interpreter.h"

namespace espalier {
namespace {

constexpr int kWaitMilliseconds = 200;
constexpr std::size_t kMostSaid = 64 << 10;
constexpr int kBadInput = 3, kUnsupported = 4;  // exit codes of espalier.records
constexpr const char* kRemedy =
    "Set ESPALIER_PYTHON to a Python 3.11 or newer, and PYTHONPATH to the folder that holds the package espalier";

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw InputError({"pipe", "a new pipe", std::strerror(errno), ""});
    read = ends[0], write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
  }
};

std::string_view last_line(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  return text.substr(text.rfind('\n') + 1);
}

// Reads the error in the child's last line; false: it is no object with these members.
bool parse_error(std::string_view line, ErrorText& out) {
  simdjson::dom::parser parser;
  simdjson::dom::element object;
  if (parser.parse(simdjson::padded_string(line)).get(object)) return false;
  const std::pair<const char*, std::string*> members[] = {
      {"where", &out.where}, {"expected", &out.expected}, {"got", &out.got}, {"remedy", &out.remedy}};
  for (const auto& [name, member] : members) {
    std::string_view text;
    if (object[name].get(text)) return false;
    *member = text;
  }
  return true;
}

std::string ending(int status) {
  if (WIFSIGNALED(status))
    return text_of("ended by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  return text_of("ended with exit status ", WEXITSTATUS(status));
}

}  // namespace

PythonRecords::PythonRecords(std::string path, std::function<void()> waiting, std::vector<std::string> reader)
    : path_(std::move(path)), python_(python_interpreter()), waiting_(std::move(waiting)) {
  Pipe out, err;
  std::vector<std::string> words = {python_, "-m"}, environment = python_environment();
  words.insert(words.end(), reader.begin(), reader.end());
  words.push_back(path_);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.write, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write, STDERR_FILENO);
  const int error = ::posix_spawnp(&child_, python_.c_str(), &actions, nullptr, null_terminated(words).data(),
                                   null_terminated(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    child_ = -1;
    throw UnsupportedError({path_, "a Python that reads this format", python_ + ": " + std::strerror(error), kRemedy});
  }
  out_ = std::exchange(out.read, -1), err_ = std::exchange(err.read, -1);
}

PythonRecords::~PythonRecords() {
  if (out_ >= 0) ::close(out_);
  if (err_ >= 0) ::close(err_);
  if (child_ < 0) return;
  ::kill(child_, SIGKILL);
  while (::waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::size_t PythonRecords::read(char* out, std::size_t capacity) {
  while (child_ >= 0) {
    if (!wait_for_output()) continue;
    const ssize_t got = ::read(out_, out, capacity);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw InputError({path_, "the output of " + python_, std::strerror(errno), ""});
    consumed_ += got;
    if (got > 0) return static_cast<std::size_t>(got);
    finish();
  }
  return 0;
}

bool PythonRecords::wait_for_output() {
  std::array<pollfd, 2> ends = {{{out_, POLLIN, 0}, {err_, POLLIN, 0}}};
  const int ready = ::poll(ends.data(), ends.size(), kWaitMilliseconds);  // an end of -1 is left out
  if (ready <= 0 && waiting_) waiting_();                                 // nothing yet, or a signal
  if (ready > 0 && ends[1].revents != 0) take_errors();
  return ready > 0 && ends[0].revents != 0;
}

void PythonRecords::take_errors() {
  std::array<char, 4096> block{};
  const ssize_t got = ::read(err_, block.data(), block.size());
  if (got < 0 && errno == EINTR) return;
  if (got <= 0) {
    ::close(err_);
    err_ = -1;
    return;
  }
  said_.append(block.data(), static_cast<std::size_t>(got));
  if (said_.size() > kMostSaid) said_.erase(0, said_.size() - kMostSaid / 2);
}

void PythonRecords::finish() {
  ::close(std::exchange(out_, -1));
  while (err_ >= 0) take_errors();
  int status = 0;
  while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
  }
  child_ = -1;
  const std::string_view line = last_line(said_);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    simdjson::dom::parser parser;
    simdjson::dom::element object;
    std::string_view format;
    simdjson::dom::array notes;
    if (parser.parse(simdjson::padded_string(line)).get(object) || object["format"].get(format) ||
        object["notes"].get(notes))
      throw UnsupportedError(
          {path_, "the format and notes from " + python_, line.empty() ? "nothing" : std::string(line), kRemedy});
    format_ = format;
    for (const simdjson::dom::element note : notes) notes_.emplace_back(note.get_c_str().value());
    return;
  }
  ErrorText error;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  if ((code == kBadInput || code == kUnsupported) && parse_error(line, error)) {
    if (code == kBadInput) throw InputError(error);
    throw UnsupportedError(error);
  }
  std::string got = python_ + " " + ending(status);
  if (!line.empty()) got.append(": ").append(line.substr(0, 300));
  throw UnsupportedError({path_, "records from the Python package", got, kRemedy});
}

}  // namespace espalier
