// The error that a call throws, so that a test can look at its parts.
#pragma once

#include <gtest/gtest.h>

#include "espalier/base/error.h"

namespace espalier::testing {

template <class Exception, class Call>
ErrorText thrown_error(Call call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.text();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace espalier::testing
