// The CPU's operations as work of a queue: what is called runs when the queue runs it, with its arguments kept by
// value.
#pragma once

#include <type_traits>
#include <vector>

#include "espalier/ops/cpu/operations.h"

namespace espalier::testing {

// Queue::give(std::function<void()>) takes the work.
template <class Queue>
class Late {
 public:
  // Every pointer of the table is set here: one left out would be the CPU's at that place, which faults on its first
  // tensor.
  static Operations operations() {
    Operations o = cpu::operations();
    using O = Operations;
    make_late<&O::norm, &O::norm_again, &O::add_norm_backward, &O::rotate, &O::add_rotate_backward, &O::swiglu,
              &O::swiglu_backward, &O::linear, &O::linear_onto, &O::linear_grad_input, &O::add_linear_grad_input,
              &O::add_linear_grad_weight, &O::gather, &O::add_scatter, &O::scatter, &O::move_rows, &O::convert,
              &O::zero_rows, &O::zero, &O::scale, &O::attention, &O::add_attention_backward, &O::logit_sums,
              &O::raise_maximum, &O::score_edges, &O::logit_gradients, &O::look_up, &O::add_look_up_backward, &O::value,
              &O::add_value_backward, &O::choose_experts, &O::router_backward, &O::scale_by_expert,
              &O::scale_by_expert_backward, &O::sort_by_expert, &O::add_experts, &O::add_experts_backward,
              &O::add_expert_rows, &O::round_sum, &O::sum_of_squares, &O::adamw, &O::choose_tokens, &O::add_scaled,
              &O::join_sinks, &O::add_sinks_backward, &O::shape_logits, &O::gated_norm, &O::add_gated_norm_backward,
              &O::gate_heads, &O::gate_heads_backward, &O::expand_heads, &O::expand_heads_backward>(o);
    o.hold_weights = [](const std::vector<at::Tensor>&, at::ScalarType, std::int64_t) {
      return std::shared_ptr<void>();
    };
    make_runs_late<&O::delta_rule, &O::add_delta_rule_backward, &O::short_convolution,
                   &O::add_short_convolution_backward>(o);
    return o;
  }

 private:
  // A problem with runs of its own.
  template <class Problem>
  class Runs {
   public:
    explicit Runs(const Problem& problem) : of_(problem), runs_(problem.runs.begin(), problem.runs.end()) {}
    Problem problem() const {
      Problem problem = of_;
      problem.runs = runs_;
      return problem;
    }

   private:
    Problem of_;
    std::vector<StateRun> runs_;
  };
  template <auto member>
  struct OfRuns;
  template <class Group, class Problem, class... Arguments, void (*Group::*member)(const Problem&, Arguments...)>
  struct OfRuns<member> {
    static void call(const Problem& problem, Arguments... arguments) {
      static_assert((std::is_copy_assignable_v<std::decay_t<Arguments>> && ...), "an argument that holds a reference");
      static_assert(std::is_copy_assignable_v<Problem>, "a problem that holds a reference");
      Queue::give([kept = Runs(problem), arguments...] { (cpu::operations().*member)(kept.problem(), arguments...); });
    }
  };
  template <auto... members>
  static void make_runs_late(Operations& operations) {
    ((operations.*members = OfRuns<members>::call), ...);
  }
  template <auto member>
  struct One;
  template <class Group, class... Arguments, void (*Group::*member)(Arguments...)>
  struct One<member> {
    static void call(Arguments... arguments) {
      // Work runs late, perhaps after the caller's model is gone. A struct with a reference in it cannot be assigned.
      static_assert((std::is_copy_assignable_v<std::decay_t<Arguments>> && ...), "an argument that holds a reference");
      Queue::give([=] { (cpu::operations().*member)(arguments...); });
    }
  };
  template <auto... members>
  static void make_late(Operations& operations) {
    ((operations.*members = One<members>::call), ...);
  }
};

template <class Queue>
const Operations& late_operations() {
  static const Operations all = Late<Queue>::operations();
  return all;
}

}  // namespace espalier::testing
