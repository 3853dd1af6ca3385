// The words of a fingerprint (shape/fingerprint.h).
//
// A structure is taken apart into all of its members where its words are written, so that a new member does not compile
// until it is written, or its name begins with `implied` or `ignored`: implied by the architecture's name, or without
// influence on what weights mean.
#pragma once

#include <concepts>
#include <cstdint>
#include <sstream>
#include <string>

#include "espalier/shape/rope.h"

namespace espalier {

class FingerprintWords {
 public:
  explicit FingerprintWords(const std::string& first) {
    out_.precision(17);
    out_ << first;
  }

  template <class Number>
  void number(const char* name, Number value) {
    out_ << " " << name << "=" << value;
  }
  // Written where the value is not the one of most models.
  template <class Number>
  void unless(std::type_identity_t<Number> usual, const char* name, Number value) {
    if (value != usual) number(name, value);
  }
  void flag(const char* name, bool value) {
    if (value) out_ << " " << name;
  }
  void text(const std::string& value) { out_ << value; }
  // How rows rotate: `channels` of a head.
  void add(const Rope& rope, std::int64_t channels);
  std::string text() && { return std::move(out_).str(); }

 private:
  std::ostringstream out_;
};

}  // namespace espalier
