// Rewards of responses: the task's own, or those of a Python function.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "espalier/loop/task.h"

namespace espalier {

class Reward {
 public:
  virtual ~Reward() = default;
  virtual double of(const Problem& problem, std::span<const std::int32_t> response_ids) = 0;
};

// `file` empty: answer_score. Otherwise compute_score of that Python file, in a process of its own.
//
// compute_score(data_source, solution_str, ground_truth, extra_info) is called once for each response with
// "espalier/<task>", the response's text without what ends it, the answer's text, and {"prompt": text, "ended": bool,
// "tokens": int}; it returns a number, or a dict with a number under "score" (verl's convention). What it prints goes
// to stderr. The file is imported with its folder on sys.path by the Python of rollout/python_interpreter.h.
// Errors: InputError with Python's message and the line where it was raised, also where the process ends or gives no
// answer within a minute.
std::unique_ptr<Reward> make_reward(const std::string& file, const std::string& task);

}  // namespace espalier
