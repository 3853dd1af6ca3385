// Router losses and expert loads, with every shared row counted once for each of its rollouts.
//
// With m_u rollouts through row u, over the rows of rollout i (scope rollout) or of the mini-batch:
//   C_e = sum_u m_u [e in top-k(u)],  f_e = C_e / (k T),  P_e = sum_u m_u p_ue / T,  T = sum_u m_u
//   aux = E sum_e f_e P_e, layers summed;  scope rollout: averaged over the mini-batch's rollouts
//   z = sum_u m_u (log sum exp logits_u)^2 / T, layers summed;  scope rollout: averaged over the mini-batch's rollouts
// f has no gradient, and aux is linear in p, so dL/dp of a row is a vector of E numbers,
//   scope rollout: coef E / N sum_i f_e^i / T_i over the row's rollouts;  scope minibatch: coef E m_u f_e / T,
// and the loss is the sum over rows of that vector times p. A rollout's counts are complete once its last row was
// forwarded, which is before the backward of any of its rows: scope rollout needs one pass. Source: mathematics,
// section 7.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/ops/router_shape.h"
#include "espalier/options/choices.h"

namespace espalier::moe {

using espalier::AuxScope;

struct RouterLosses {
  double aux_coef = 0, z_coef = 0;
  AuxScope scope = AuxScope::rollout;

  bool any() const { return aux_coef != 0 || z_coef != 0; }
};

// Rows [begin, end) of a set belong to these rollouts, numbered as in the mini-batch.
struct RowOwners {
  std::int64_t begin = 0, end = 0;
  std::span<const std::int32_t> rollouts;
};

class LoadAccounting {
 public:
  // `lengths`: prompt + response of every rollout of the mini-batch. `shape.rows` is not read. `keep_rollouts`: keeps
  // the counts of each rollout even if no loss needs them, so that other accountings can take them.
  LoadAccounting(std::int64_t layers, const RouterShape& shape, std::vector<std::int64_t> lengths, RouterLosses losses,
                 bool keep_rollouts = false);

  // True if all rows must run a last expert block, not only output rows. If not, that layer is not counted, because its
  // router sees output rows only.
  bool all_rows_choose() const { return losses_.any() || keep_rollouts_; }
  bool has_losses() const { return losses_.any(); }
  // Scope minibatch: the counts of all rows are needed before the first backward.
  bool needs_counts_first() const { return losses_.aux_coef != 0 && losses_.scope == AuxScope::minibatch; }
  // After a counting pass: rows that are forwarded again are not counted again.
  void finish_counting() { counting_ = false; }
  // Replaces a counting pass: rollout i of this mini-batch is rollout `of[i]` of `counted`, which kept the counts of
  // all rollouts at the same weights. Errors: InternalError if shapes or lengths differ.
  void take_counts(const LoadAccounting& counted, std::span<const std::int64_t> of);

  // Called before any counting if ranks count different rows of the same rollouts.
  void count_apart();
  // Afterwards not_joined returns the counts of these rollouts since the last join, [rollouts, layers, E], or nothing
  // if no loss needs the counts of whole rollouts; join takes their sum over ranks. Loads are not joined.
  std::vector<std::int64_t> not_joined(std::span<const std::int32_t> rollouts) const;
  void join(std::span<const std::int32_t> rollouts, std::span<const std::int64_t> sum);

  // Adds the choices of a set's rows, once for each owner. Called once per row and layer.
  void add_choices(std::int64_t layer, std::span<const RowOwners> owners, const std::int32_t* choice_RK);

  // The penalties of a set's rows in the form of RouterPenalty; one group for each element of `owners`.
  struct Penalty {
    std::vector<std::int32_t> group_R;
    std::vector<double> probability_GE, z_G;  // empty if the loss is off
  };
  // Errors: InternalError if a row's rollouts were not counted to their end.
  Penalty penalty(std::int64_t layer, std::span<const RowOwners> owners) const;

  // Adds penalty values of some rows, as router_backward returns them.
  void add(const PenaltySums& sums) { sums_.aux += sums.aux, sums_.z += sums.z; }

  // Losses so far, before their coefficients; 0 if a loss is off.
  double aux_loss() const { return losses_.aux_coef == 0 ? 0 : sums_.aux / losses_.aux_coef; }
  double z_loss() const { return losses_.z_coef == 0 ? 0 : sums_.z / losses_.z_coef; }
  double weighted_loss() const { return sums_.aux + sums_.z; }

  // C_e of a layer over the mini-batch, [E]; all 0 in a dense layer.
  std::span<const std::int64_t> load(std::int64_t layer) const;
  // The same for all layers, [layers, E]. Ranks that counted parts of a mini-batch sum these.
  std::span<std::int64_t> all_loads() { return of_mini_batch_; }

 private:
  std::int64_t* counts_of(std::int64_t layer, std::int64_t rollout);
  const std::int64_t* counts_of(std::int64_t layer, std::int64_t rollout) const;
  void add_owner_terms(std::int64_t layer, const RowOwners& owners, double* probability_E) const;
  double share_of_mean(const RowOwners& owners) const;
  void add_share(const std::int64_t* counts, std::int64_t tokens, double factor, double* probability_E) const;

  std::int64_t layers_;
  RouterShape shape_;
  std::vector<std::int64_t> lengths_;
  std::int64_t tokens_ = 0;  // T of the mini-batch
  RouterLosses losses_;
  bool keep_rollouts_;
  bool counting_ = true;
  std::vector<std::int64_t> of_rollout_;     // [N, layers, E]; if kept, or with scope rollout and the auxiliary loss
  std::vector<std::int64_t> not_joined_;     // counts unknown to other ranks; empty: ranks do not count apart
  std::vector<std::int64_t> of_mini_batch_;  // [layers, E]
  PenaltySums sums_;
};

}  // namespace espalier::moe
