// Records that the Python package reads: `python -m espalier.records PATH` runs as a child, and the neutral JSON Lines
// it prints are the stream. No shell and no temporary file; the child never outlives the stream. The Python and its
// environment: python_interpreter.h.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "espalier/rollout/byte_stream.h"

namespace espalier {

class PythonRecords : public ByteStream {
 public:
  // Starts the child: module and arguments of `reader`, then the path. `waiting` runs a few times a second while
  // nothing comes; it may throw. Errors: UnsupportedError where the Python cannot be started.
  PythonRecords(std::string path, std::function<void()> waiting,
                std::vector<std::string> reader = {"espalier.records", "--"});
  PythonRecords(const PythonRecords&) = delete;
  PythonRecords& operator=(const PythonRecords&) = delete;
  ~PythonRecords() override;

  // Errors: the child's own (InputError or UnsupportedError with its place and remedy), told at the end of its output;
  // UnsupportedError with the last line of its stderr if it ended in another way.
  std::size_t read(char* out, std::size_t capacity) override;
  std::int64_t consumed_bytes() const override { return consumed_; }  // of the text

  // Known once read() has given 0.
  const std::string& format() const { return format_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  bool wait_for_output();  // true: stdout has bytes or has ended
  void take_errors();
  void finish();

  std::string path_, python_;
  std::function<void()> waiting_;
  pid_t child_ = -1;  // -1: none, or waited for
  int out_ = -1, err_ = -1;
  std::string said_;  // the end of its stderr
  std::int64_t consumed_ = 0;
  std::string format_;
  std::vector<std::string> notes_;
};

}  // namespace espalier
