#include "espalier/services/python_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "espalier/rollout/python_interpreter.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

// Milliseconds until `deadline`, at least 0.
int left_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<std::int64_t>(left, 0));
}

}  // namespace

PythonProcess::PythonProcess(std::vector<std::string> arguments, std::string name) : name_(std::move(name)) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw InputError({name_, "a socket to a Python process", std::strerror(errno), ""});
  socket_ = ends[0];
  ::fcntl(socket_, F_SETFL, O_NONBLOCK);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 0);  // also clears close-on-exec
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawnattr_t own_group;
  posix_spawnattr_init(&own_group);
  posix_spawnattr_setflags(&own_group, POSIX_SPAWN_SETPGROUP);
  arguments.insert(arguments.begin(), python_interpreter());
  std::vector<std::string> environment = python_environment();
  const int failure = ::posix_spawnp(&process_, arguments.front().c_str(), &actions, &own_group,
                                     null_terminated(arguments).data(), null_terminated(environment).data());
  posix_spawnattr_destroy(&own_group);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (failure == 0) return;
  ::close(socket_);
  throw InputError({name_, "a Python to run it (" + arguments.front() + ")", std::strerror(failure),
                    "set ESPALIER_PYTHON to a Python 3.11 or newer"});
}

PythonProcess::~PythonProcess() {
  ::close(socket_);
  if (process_ < 0) return;
  ::kill(-process_, SIGKILL);
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void PythonProcess::fail_late(int patience) const {
  throw PythonLate(
      {name_, "an answer of the Python process", text_of("none within ", patience / 1000.0, " seconds"), ""});
}

// Its end of the socket is closed: it has ended, or is about to, or has only closed it.
void PythonProcess::fail_ended() {
  int status = 0;
  const pid_t process = std::exchange(process_, -1);
  pid_t ended = 0;
  for (int tries = 0; ended == 0 && tries < 100; ++tries) {
    ended = ::waitpid(process, &status, WNOHANG);
    if (ended == 0) ::usleep(10'000);
  }
  ::kill(-process, SIGKILL);  // it, or those it leaves behind
  if (ended == 0) ::waitpid(process, &status, 0);
  std::string end = "its end";
  if (WIFEXITED(status)) end = text_of("its end with status ", WEXITSTATUS(status));
  if (WIFSIGNALED(status) && ended != 0)
    end = text_of("its end by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  throw PythonEnded({name_, "an answer of the Python process", end, "its own output, if any, is above"});
}

void PythonProcess::send(const std::string& line, int patience) {
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(patience);
  for (std::size_t sent = 0; sent < line.size();) {
    const ssize_t count = ::send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd waiting{socket_, POLLOUT, 0};
      if (::poll(&waiting, 1, left_until(deadline)) == 0) fail_late(patience);
    } else if (errno != EINTR) {
      fail_ended();
    }
  }
}

std::string PythonProcess::receive(int patience) {
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(patience);
  for (std::size_t searched = 0;;) {
    if (const std::size_t end = received_.find('\n', searched); end != std::string::npos) {
      std::string answer = received_.substr(0, end);
      received_.erase(0, end + 1);
      return answer;
    }
    searched = received_.size();
    pollfd waiting{socket_, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, left_until(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) fail_late(patience);
    char buffer[1 << 16];
    const ssize_t count = ::recv(socket_, buffer, sizeof buffer, 0);
    if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) continue;
    if (count <= 0) fail_ended();
    received_.append(buffer, static_cast<std::size_t>(count));
  }
}

}  // namespace espalier
