// Built-in tasks whose answers can be checked: a long document, a question about it, one right answer.
//
//   retrieval   facts and other sentences: "otter teal ; the rain fell ; yak plum ; ... ? otter" -> "teal"
//   recite      lines of names: "elm yak plum ... ; ... ? yak" -> what follows in that line, 4 to 11 names
//   arithmetic  a chain of sums modulo 10 with every value given: "elm = 3 ; yak = elm + 9 = 2 ; ... ? yak + 5 ="
//               -> "7"
//   copy        lines of words: "kiwi : old rain ... ; ... ? copy kiwi with moon for rain" -> "old moon ..."
//
// Problems are made on the spot from a random state alone. Training and held-out problems are disjoint: the hash of a
// prompt's tokens says which of the two it belongs to.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/random.h"
#include "espalier/options/choices.h"
#include "espalier/tasks/vocabulary.h"

namespace espalier {

struct Problem {
  TokenIds prompt_ids;
  TokenIds answer_ids;  // without <end>
};

enum class Split { train, held_out };
Split split_of(std::span<const std::int32_t> prompt_ids);  // one prompt in eight is held out

struct Task {
  TaskKind kind = TaskKind::retrieval;
  std::int64_t prompt_length = 0;  // tokens of every prompt, exactly

  // One to `most` problems about one document, so their prompts share all but the question. A function of the
  // arguments. Errors: OptionError where the prompt length is too short for the task.
  std::vector<Problem> problems(Split split, Random random, std::int64_t most) const;

  std::int64_t shortest_prompt() const;  // tokens of a prompt whose document has two things to tell apart

  // Tokens of the longest right answer, with <end>.
  std::int64_t longest_answer() const;
};

// How right a response is, in [0, 1]: the number of places where it has the answer's token, over the number of places.
// These are the tokens of the longer of the two, without <end>, and one more for a response that has no <end>.
double answer_score(std::span<const std::int32_t> response_ids, std::span<const std::int32_t> answer_ids);

}  // namespace espalier
