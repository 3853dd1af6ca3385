#include "espalier/base/error.h"

namespace espalier {
namespace {

std::string sentence(const ErrorText& text) {
  std::string out = text.where;
  if (!out.empty()) out += ": ";
  if (!text.expected.empty())
    out += "expected " + text.expected + ", got " + text.got;
  else
    out += text.got;
  if (!text.remedy.empty()) out += ". " + text.remedy;
  return out;
}

}  // namespace

Error::Error(const char* kind, int exit_code, ErrorText text)
    : std::runtime_error(sentence(text)), kind_(kind), exit_code_(exit_code), text_(std::move(text)) {}

}  // namespace espalier
