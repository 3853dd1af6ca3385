// Small rollouts written by hand, for the tests of this folder.
#pragma once

#include <string>

#include "espalier/rollout/rollout.h"

namespace espalier {

// A rollout of one prompt token with `tokens` response tokens, all of them loss tokens.
inline Rollout make_rollout(int tokens, std::string group = "\"a\"") {
  Rollout rollout;
  rollout.prompt_ids = {1};
  for (int t = 0; t < tokens; ++t) rollout.response_ids.push_back(2 + t);
  rollout.loss_mask.assign(tokens, 1);
  rollout.group = std::move(group);
  rollout.where = "example.jsonl:1";
  return rollout;
}

inline Rollout make_rewarded(int tokens, double reward, std::string group = "\"a\"") {
  Rollout rollout = make_rollout(tokens, std::move(group));
  rollout.reward = reward;
  return rollout;
}

}  // namespace espalier
