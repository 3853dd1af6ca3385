// Environments of agents by class Environment of a Python file, in a process of its own that stays (docs/agents.md).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/services/python_service.h"

namespace espalier {

class Environment {
 public:
  // Imports the file. An answer may take `timeout` seconds. Errors: InputError naming what the file lacks, with
  // Python's message and the line where it was raised.
  Environment(const std::string& file, double timeout);
  Environment(const Environment&) = delete;  // its service reports errors to it
  Environment& operator=(const Environment&) = delete;

  // "the environment of ...", for messages: the trajectory of item i of a call.
  using About = std::function<std::string(std::size_t item)>;

  // A new environment for each item {"trajectory", "prompt", "fields"}; all earlier ones end. Answers {"observation"}:
  // null, a text, a message or a list of messages. Errors of both: InputError with Python's message for an exception,
  // an answer of another form, none in time, and a process that dies.
  std::vector<Json> reset(const std::vector<Json>& items, const About& about);
  // A turn for each item {"trajectory", "text", "last"}. Answers {"observation", "reward", "done"}. The environment
  // ends where it is done or the turn is the last one.
  std::vector<Json> step(const std::vector<Json>& items, const About& about);

 private:
  std::vector<Json> ask(const char* method, const std::vector<Json>& items, const About& about);
  [[noreturn]] void fail(const Json& error, std::size_t place) const;

  std::string file_;
  const char* method_ = "";  // while ask() runs
  const About* about_ = nullptr;
  PythonService service_;
};

}  // namespace espalier
