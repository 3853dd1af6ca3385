// Errors a user can meet, one class per exit code of the program.
//
// An error says where it happened ("rollouts.jsonl:17"), what was expected, what was found and what to do about it.
// The library throws and never prints or exits; the program prints `what()` and returns `exit_code()`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace espalier {

struct ErrorText {
  std::string where;
  std::string expected;
  std::string got;
  std::string remedy;
};

class Error : public std::runtime_error {
 public:
  Error(const char* kind, int exit_code, ErrorText text);

  const char* kind() const { return kind_; }
  int exit_code() const { return exit_code_; }
  const ErrorText& text() const { return text_; }

 private:
  const char* kind_;
  int exit_code_;
  ErrorText text_;
};

// Wrong usage or option.
class OptionError : public Error {
 public:
  explicit OptionError(ErrorText text) : OptionError("option", std::move(text)) {}

 protected:
  OptionError(const char* kind, ErrorText text) : Error(kind, 2, std::move(text)) {}
};

// An output path that the system refuses to create or write.
class WriteError : public OptionError {
 public:
  explicit WriteError(ErrorText text) : OptionError("write", std::move(text)) {}
};

#define ESPALIER_ERROR_CLASS(Name, kind, code)                            \
  class Name : public Error {                                             \
   public:                                                                \
    static constexpr int kExitCode = code;                                \
    explicit Name(ErrorText text) : Error(kind, code, std::move(text)) {} \
  }

ESPALIER_ERROR_CLASS(InputError, "input", 3);                // bad rollouts, model, trace or checkpoint
ESPALIER_ERROR_CLASS(UnsupportedError, "unsupported", 4);    // valid, but not supported; names what
ESPALIER_ERROR_CLASS(MemoryBudgetError, "memory", 5);        // cannot fit the memory budget
ESPALIER_ERROR_CLASS(VerificationError, "verification", 6);  // shared and dense differ
ESPALIER_ERROR_CLASS(CommunicationError, "communication", 7);
ESPALIER_ERROR_CLASS(DeviceError, "device", 8);       // no such device or backend
ESPALIER_ERROR_CLASS(InternalError, "internal", 70);  // a defect of Espalier

#undef ESPALIER_ERROR_CLASS

// Joins its arguments with operator<<.
template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace espalier

// A condition that only a defect of Espalier can break: adds the place in the source and, for _EQ, both values.
#define ESPALIER_INTERNAL(condition, ...)                                                                          \
  do {                                                                                                             \
    if (!(condition)) [[unlikely]]                                                                                 \
      throw ::espalier::InternalError({::espalier::text_of(__FILE__, ":", __LINE__), #condition,                   \
                                       ::espalier::text_of("" __VA_OPT__(, ) __VA_ARGS__), "please report this"}); \
  } while (false)

#define ESPALIER_INTERNAL_EQ(a, b, ...) \
  ESPALIER_INTERNAL((a) == (b), (a), " against ", (b), ". " __VA_OPT__(, ) __VA_ARGS__)
