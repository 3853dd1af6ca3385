#include "espalier/loop/python_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/rollout/python_interpreter.h"

extern char** environ;

namespace espalier {
PythonProcess::PythonProcess(const std::string& program, const std::string& argument, std::string name, int patience)
    : name_(std::move(name)), patience_(patience) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail(std::strerror(errno));
  socket_ = ends[0];
  const timeval limit{patience_ / 1000, patience_ % 1000 * 1000};
  ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 0);  // also clears close-on-exec
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  std::vector<std::string> words{python_interpreter(), "-c", program, argument};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  // In a group of its own, so that Ctrl-C does not take it away from a step that is still finished.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  const int failure =
      ::posix_spawnp(&process_, words.front().c_str(), &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (failure == 0) return;
  ::close(socket_);
  throw InputError({name_, "a Python to run it (" + words.front() + ")", std::strerror(failure),
                    "set ESPALIER_PYTHON to a Python 3, or leave --reward out"});
}

PythonProcess::~PythonProcess() {
  ::close(socket_);
  if (process_ < 0) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

void PythonProcess::fail(const std::string& got) const {
  throw InputError({name_, "an answer of the Python process", got, "its own output stands above, if there was any"});
}

void PythonProcess::fail_late() const { fail(text_of("none within ", patience_ / 1000.0, " seconds")); }

// Its end of the socket is closed: it has ended, or is about to, or has only closed it.
void PythonProcess::fail_ended() {
  int status = 0;
  const pid_t process = std::exchange(process_, -1);
  pid_t ended = 0;
  for (int tries = 0; ended == 0 && tries < 100; ++tries) {
    ended = ::waitpid(process, &status, WNOHANG);
    if (ended == 0) ::usleep(10'000);
  }
  if (ended == 0) {
    ::kill(process, SIGKILL);
    ::waitpid(process, &status, 0);
  }
  fail(WIFEXITED(status) ? text_of("its end with status ", WEXITSTATUS(status)) : "its end");
}

std::string PythonProcess::ask(const std::string& line) {
  for (std::size_t sent = 0; sent < line.size();) {
    const ssize_t count = ::send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) fail_late();
    if (count < 0) fail_ended();
    sent += static_cast<std::size_t>(count);
  }
  for (;;) {
    if (const std::size_t end = received_.find('\n'); end != std::string::npos) {
      std::string answer = received_.substr(0, end);
      received_.erase(0, end + 1);
      return answer;
    }
    pollfd waiting{socket_, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, patience_);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) fail_late();
    char buffer[4096];
    const ssize_t count = ::recv(socket_, buffer, sizeof buffer, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_ended();
    received_.append(buffer, static_cast<std::size_t>(count));
  }
}

}  // namespace espalier
