// A program in letters, for tests to compare.
#pragma once

#include <string>

#include "espalier/program/program.h"

namespace espalier {

// "A B0 b0 C": a trunk's forward, a wave's forward and backward with its region, a trunk's backward; (..) joined.
inline std::string text_of_program(const Program& program) {
  std::string out;
  for (const Step& step : program) {
    const bool forward = step.pass == Pass::forward;
    const std::string name =
        step.kind == ItemKind::trunk ? (forward ? "A" : "C") : (forward ? "B" : "b") + std::to_string(step.region);
    if (!out.empty()) out += ' ';
    out += step.own != nullptr ? name : "(" + name + ")";
  }
  return out;
}

}  // namespace espalier
