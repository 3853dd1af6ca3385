// A regular expression of ECMAScript. <regex> takes seconds to compile in every file that includes it: expression.cpp
// alone does.
#pragma once

#include <memory>
#include <string>

namespace espalier {

class Expression {
 public:
  // Errors: std::invalid_argument, whose text says what is wrong with `text`.
  explicit Expression(const std::string& text);

  bool matches(const std::string& whole) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace espalier
