// A service of python/espalier/texts: a long-lived process that answers requests and is restarted if it dies.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "espalier/base/json.h"
#include "espalier/services/python_process.h"

namespace espalier {

class PythonService {
 public:
  // Throws the error that an object {"kind", "message", ...} of the process stands for, with item `place` of what was
  // asked; kNoPlace: it could not start.
  using OnError = std::function<void(const Json& error, std::size_t place)>;
  static constexpr std::size_t kNoPlace = static_cast<std::size_t>(-1);

  // Starts `python -m espalier.texts SERVICE PATH`. An answer may take `patience` milliseconds, the start at least a
  // minute. `has_state`: a process that dies takes with it what later requests need, so none takes its place. Errors:
  // as PythonProcess and `on_error`.
  PythonService(const std::string& service, const std::string& path, int patience, OnError on_error,
                bool has_state = false);

  const Json& ready() const { return ready_; }  // what it told of itself

  // The process's one answer.
  Json ask(const std::string& request);

  // `request_from(first)` asks for items [first, count), which are answered by one line each; `on_answer` sees them in
  // order. A process that dies is started again and asked for what is left; one that dies twice at the same item is an
  // error.
  void ask_each(std::size_t count, const std::function<std::string(std::size_t first)>& request_from,
                const std::function<void(std::size_t item, const Json& answer)>& on_answer);

 private:
  void start();
  Json receive(int patience, std::size_t place);

  std::string service_, path_;
  int patience_;
  bool has_state_;
  OnError on_error_;
  Json ready_;
  std::unique_ptr<PythonProcess> process_;
};

}  // namespace espalier
