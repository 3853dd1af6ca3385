// How the C interfaces end a call: what it throws is kept for espalier_last_error() and becomes a return value.
#pragma once

#include <exception>

#include "espalier/base/error.h"

namespace espalier {

// Keeps the error of this thread's last failed call.
void keep_error(const char* kind, int exit_code, const ErrorText& text);

template <class Result, class Call>
Result guarded(Result failed, Call call) {
  try {
    return call();
  } catch (const Error& error) {
    keep_error(error.kind(), error.exit_code(), error.text());
  } catch (const std::exception& error) {
    keep_error("internal", 70, {"the core library", "no exception", error.what(), "please report this"});
  }
  return failed;
}

}  // namespace espalier
