// A Python process that answers one line of JSON with one line of JSON.
#pragma once

#include <sys/types.h>

#include <string>

namespace espalier {

class PythonProcess {
 public:
  // Runs `program`, a Python source text, with `argument`, by the Python of rollout/python_interpreter.h. `name` stands
  // in messages: the user's file. An answer may take `patience` milliseconds. Errors: InputError where no Python can be
  // started.
  PythonProcess(const std::string& program, const std::string& argument, std::string name, int patience = 60'000);
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;
  ~PythonProcess();  // ends the process

  // Errors: InputError where the process has ended or does not answer in time.
  std::string ask(const std::string& line);

 private:
  [[noreturn]] void fail(const std::string& got) const;
  [[noreturn]] void fail_late() const;
  [[noreturn]] void fail_ended();

  std::string name_, received_;
  int patience_, socket_ = -1;
  pid_t process_ = -1;
};

}  // namespace espalier
