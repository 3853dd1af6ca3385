// A Python process of the package's that answers lines of JSON with lines of JSON.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "espalier/base/error.h"

namespace espalier {

// The process has ended, or is about to. The caller may start another one and ask again.
class PythonEnded : public InputError {
 public:
  using InputError::InputError;
};

// It neither reads nor answers.
class PythonLate : public InputError {
 public:
  using InputError::InputError;
};

class PythonProcess {
 public:
  // Runs `arguments` by the Python of rollout/python_interpreter.h, in a process group of its own: an interrupt from
  // the keyboard is the program's to handle. `name` stands in messages: the user's file or folder. The child has one
  // end of a socket as its standard input and output. Errors: InputError where no Python can be started.
  PythonProcess(std::vector<std::string> arguments, std::string name);
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;
  ~PythonProcess();  // ends the process and those it started

  // Errors of both: PythonEnded; PythonLate after `patience` milliseconds.
  void send(const std::string& line, int patience);
  std::string receive(int patience);  // the next line, without its end

 private:
  [[noreturn]] void fail_late(int patience) const;
  [[noreturn]] void fail_ended();

  std::string name_, received_;
  int socket_ = -1;
  pid_t process_ = -1;
};

}  // namespace espalier
