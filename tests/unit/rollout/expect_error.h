// An error with its parts, for tests that say which sentence a user must see.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "espalier/base/error.h"

namespace espalier::testing {

// Runs `action`, which must throw an E whose `where` contains `where` and whose whole text contains `words`.
template <class E, class Action>
void expect_error(const Action& action, const std::string& where, const std::string& words) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown; expected an error at " << where << " with " << words;
  } catch (const E& error) {
    EXPECT_NE(error.text().where.find(where), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    EXPECT_FALSE(error.text().expected.empty()) << error.what();
    EXPECT_FALSE(error.text().got.empty()) << error.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another error was thrown: " << other.what();
  }
}

}  // namespace espalier::testing
