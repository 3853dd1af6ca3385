#include "espalier/base/expression.h"

#include <regex>
#include <stdexcept>

namespace espalier {

struct Expression::Compiled {
  std::regex expression;
};

Expression::Expression(const std::string& text) try
    : compiled_(std::make_shared<const Compiled>(Compiled{std::regex(text)})) {
} catch (const std::regex_error& error) {
  throw std::invalid_argument(error.what());
}

bool Expression::matches(const std::string& whole) const { return std::regex_match(whole, compiled_->expression); }

}  // namespace espalier
