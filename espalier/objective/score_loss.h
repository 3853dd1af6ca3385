// --objective reward: the loss of a reward model over sets of answers, and its derivative. A set is a pair, whose
// chosen answer is above the rejected one, or a list of scored answers. The loss is the mean over sets of
//
//   sum over answers a with a lower one of  -log( e^(r_a - m) / (e^(r_a - m) + sum over b lower than a of e^(r_b)) )
//   + c * mean over pairs of answers of (r_a + r_b)^2
//
// r is the model's score at the last token of an answer, m the margin of a pair (0 for a list), and c is
// --center-rewards-coefficient. For a pair this is -log sigmoid(r_chosen - r_rejected - m) + c (r_chosen +
// r_rejected)^2, Bradley-Terry; for a list without equal scores it is -log of the probability of its order by
// Plackett-Luce. Answers with equal scores are not compared with each other. Sources: TRL 1.16, RewardTrainer; Plackett
// 1975, "The analysis of permutations". Table: docs/pairs.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/objective/value_loss.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Appends a token, id 0, to every answer; it becomes the answer's only loss token. A response token's value is that of
// the row before it, so the value of the appended token is the score of the answer. This adds one row per answer.
void end_with_scores(std::span<Rollout> rollouts);

// Named as in TRL. Accuracy and margin are means over sets of the mean over a set's pairs of different rank; a list of
// equal scores is left out. least, mean and most are over all answers of a mini-batch.
struct ScoreMeans {
  double loss = 0, accuracy = 0, margin = 0, least = 0, mean = 0, most = 0;
};

struct ScoreLoss {
  std::vector<double> slope;  // dL / dr of every rollout
  ScoreMeans means;
};

// `scores`: r of every rollout. Errors: InputError for a rollout that belongs to no set.
ScoreLoss score_loss(std::span<const Rollout> rollouts, std::span<const double> scores, const Options& options);

// The derivative of score_loss in the form that a head takes. Every edge gets dL/dr of its rollout, so the edges must
// belong to the appended tokens alone.
class ScoreSlopes : public ValueSlopes {
 public:
  explicit ScoreSlopes(std::span<const double> slope) : slope_(slope) {}
  void add_edges(std::span<const LossEdge> edges, std::span<const double> value, std::span<double> grad_value) override;

 private:
  std::span<const double> slope_;
};

}  // namespace espalier
