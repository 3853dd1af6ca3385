// Routers and experts on a GPU.
//
// Where there are grouped products, the slots run through them in windows of as many as the scratch has rows, whatever
// experts they belong to: the device knows where each ends, and the host goes on. It has to know when it asks for the
// gradients of the weights, one product an expert, added in float32 where they stand: by then the numbers are in
// flight. Elsewhere products run one expert after the other, and the host waits once a call.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/moving.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

moe::RouterShape shape_of(const at::Tensor& choice_RK, std::int64_t experts, const RouterRule& rule) {
  if (experts > kMostExperts)
    throw UnsupportedError({"router", text_of("at most ", kMostExperts, " experts a layer on a GPU"), text_of(experts),
                            "use --device cpu"});
  return {choice_RK.size(0), experts,     choice_RK.size(1), rule.renormalise,
          rule.sigmoid,      rule.groups, rule.top_groups,   rule.scaling};
}

void choose(const at::Tensor& logits_RE, const at::Tensor& recorded_RK, const RouterRule& rule,
            const at::Tensor& choice_RK, const at::Tensor& weight_RK) {
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    choose_experts<T>(shape_of(choice_RK, logits_RE.size(1), rule), pointer<T>(logits_RE),
                      pointer<std::int32_t>(recorded_RK), pointer<accumulator_t<T>>(rule.correction_E),
                      pointer<std::int32_t>(choice_RK), pointer<accumulator_t<T>>(weight_RK));
  });
}

void backward(const at::Tensor& logits_RE, const at::Tensor& choice_RK, const RouterRule& rule,
              const at::Tensor& grad_weight_RK, const RouterPenalty& penalty, const at::Tensor& grad_logits_RE,
              const at::Tensor& penalties_2) {
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    router_backward<T>(
        shape_of(choice_RK, logits_RE.size(1), rule), pointer<T>(logits_RE), pointer<std::int32_t>(choice_RK),
        pointer<accumulator_t<T>>(grad_weight_RK),
        {pointer<std::int32_t>(penalty.group_R), pointer<double>(penalty.probability_GE), pointer<double>(penalty.z_G)},
        pointer<T>(grad_logits_RE), pointer<double>(penalties_2));
  });
}

void scale_weights(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                   const at::Tensor& out_RK) {
  dispatch(scale_E.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    scale_by_expert<T>(weight_RK.numel(), pointer<A>(weight_RK), pointer<std::int32_t>(choice_RK), pointer<T>(scale_E),
                       pointer<A>(out_RK));
  });
}

void scale_weights_backward(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                            const at::Tensor& grad_RK, const at::Tensor& grad_scale_E) {
  if (grad_scale_E.defined())
    dispatch(scale_E.scalar_type(), [&]<class T>() {
      using A = accumulator_t<T>;
      add_scale_gradient(weight_RK.numel(), scale_E.numel(), pointer<A>(weight_RK), pointer<std::int32_t>(choice_RK),
                         pointer<A>(grad_RK), pointer<A>(grad_scale_E));
    });
  scale_weights(grad_RK, choice_RK, scale_E, grad_RK);
}

void sort(const at::Tensor& choice_RK, const SortedSlots& sorted) {
  sort_by_expert(shape_of(choice_RK, sorted.begin_E1.size(0) - 1, false), pointer<std::int32_t>(choice_RK),
                 pointer<std::int32_t>(sorted.begin_E1), pointer<std::int32_t>(sorted.row_S),
                 pointer<std::int32_t>(sorted.slot_S));
}

// Where the slots stand, for sums over windows of them.
class PlacedSlots {
 public:
  explicit PlacedSlots(const SortedSlots& sorted) : slots_(sorted.slot_S.size(0)), place_S_(slots_) {
    find_places(slots_, pointer<std::int32_t>(sorted.slot_S), place_S_.get());
  }
  // sum_r += w_s y_s for the slots of the window; weight undefined: 1.
  void add(Places window, const at::Tensor& y_NM, const at::Tensor& weight_RK, const at::Tensor& sum_RM) const {
    const std::int64_t rows = sum_RM.size(0);
    ESPALIER_INTERNAL(slots_ % rows == 0, slots_, " slots of ", rows, " rows");
    dispatch(y_NM.scalar_type(), [&]<class T>() {
      using A = accumulator_t<T>;
      add_expert_rows<T>(rows, slots_ / rows, sum_RM.size(1), window, place_S_.get(), pointer<T>(y_NM),
                         pointer<A>(weight_RK), pointer<A>(sum_RM));
    });
  }

 private:
  std::int64_t slots_;
  Scratch<std::int32_t> place_S_;
};

void add_rows(const SortedSlots& sorted, const at::Tensor& y_SM, const at::Tensor& weight_RK,
              const at::Tensor& sum_RM) {
  const std::int64_t slots = sorted.slot_S.size(0);
  if (slots > 0) PlacedSlots(sorted).add({0, slots}, y_SM, weight_RK, sum_RM);
}

// Where each expert's slots begin, on their way to the host while it goes on.
class Begins {
 public:
  explicit Begins(const SortedSlots& sorted) : count_(static_cast<std::size_t>(sorted.begin_E1.size(0))) {
    const std::size_t bytes = count_ * sizeof(std::int32_t);
    landing_ = landing().of(bytes);
    const Event sorted_now = record(Queue::compute);
    wait(Queue::copy, sorted_now);
    copy(Queue::copy, landing_, sorted.begin_E1.data_ptr(), bytes);
    forget(sorted_now);
    copied_ = record(Queue::copy);
  }
  ~Begins() {
    if (copied_ != kNoEvent) forget(copied_);
  }
  Begins(const Begins&) = delete;
  Begins& operator=(const Begins&) = delete;

  // Waits for them. Calls visit(expert, first entry, entries) for the experts that have any in the window.
  template <class Visit>
  void for_each_expert(Places window, Visit visit) {
    if (begin_.empty()) {
      wait_until(copied_);
      begin_.resize(count_);
      std::memcpy(begin_.data(), landing_, count_ * sizeof(std::int32_t));
    }
    for (std::size_t e = 0; e + 1 < count_; ++e) {
      const std::int64_t first = std::max<std::int64_t>(begin_[e], window.first);
      const std::int64_t end = std::min<std::int64_t>(begin_[e + 1], window.first + window.count);
      if (end > first) visit(static_cast<std::int64_t>(e), first, end - first);
    }
  }

 private:
  static PinnedMemory& landing() {
    static auto* const one = new PinnedMemory;  // given back by the system: CUDA may be gone by then
    return *one;
  }

  std::size_t count_;
  std::byte* landing_;
  Event copied_;
  std::vector<std::int32_t> begin_;
};

// sum_R += w_e y_e of an expert's rows, which are distinct; weight undefined: 1.
void add_rows_of_expert(const at::Tensor& y_NM, const at::Tensor& row_N, const at::Tensor& slot_N,
                        const at::Tensor& weight_RK, const at::Tensor& sum_RM) {
  dispatch(y_NM.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_weighted_rows<T>(y_NM.size(0), y_NM.size(1), pointer<std::int32_t>(row_N), pointer<std::int32_t>(slot_N),
                         pointer<T>(y_NM), pointer<A>(weight_RK), pointer<A>(sum_RM));
  });
}

// The arguments of the two operations.
struct ForwardCall {
  const SortedSlots& sorted;
  const ExpertWeights& weights;
  const at::Tensor &x_RM, &weight_RK, &gate_up_SW, &sum_RM;
  const ExpertScratch& scratch;
};
struct BackwardCall {
  const SortedSlots& sorted;
  const ExpertWeights& weights;
  const at::Tensor &x_RM, &weight_RK, &gate_up_SW, &grad_sum_RM;
  const ExpertWeights& grads;
  const at::Tensor &grad_x_sum_RM, &grad_weight_RK;
  const ExpertScratch& scratch;
};

// The parts of the scratch and of the sorted slots that a window of slots, or the entries of one expert, have.
struct Part {
  at::Tensor row_N, slot_N, gate_up_NW, rows_NM, act_NF, grad_gate_up_NW;
};
Part part_of(const SortedSlots& sorted, const at::Tensor& gate_up_SW, const ExpertScratch& scratch, Places of) {
  const auto first = [&](const at::Tensor& x) { return x.defined() ? x.narrow(0, 0, of.count) : x; };
  return {sorted.row_S.narrow(0, of.first, of.count),
          sorted.slot_S.narrow(0, of.first, of.count),
          gate_up_SW.narrow(0, of.first, of.count),
          first(scratch.rows_RM),
          first(scratch.act_RF),
          first(scratch.grad_gate_up_RW)};
}

// True if the gradient of a slot's weight follows from gate, up and their gradients.
bool is_plain(const ExpertWeights& weights) {
  return weights.activation.kind == Activation::silu && weights.activation.gated && !weights.down_bias_EM.defined();
}

// For other activations: a slot's weight multiplies the gradients of act and of the result, which part.rows has.
void differentiate_other_activation(const BackwardCall& c, const Part& part, Places of) {
  if (c.weight_RK.defined()) {
    // Its place is free: gate_up's gradient comes after it.
    const at::Tensor again_NF =
        part.grad_gate_up_NW.view({-1}).narrow(0, 0, part.act_NF.numel()).view(part.act_NF.sizes());
    swiglu_operations().swiglu(c.weights.activation, part.gate_up_NW, again_NF);
    dispatch(part.act_NF.scalar_type(), [&]<class T>() {
      using A = accumulator_t<T>;
      weigh_gradient_of_act<T>(of.count, part.act_NF.size(1), part.rows_NM.size(1), pointer<std::int32_t>(part.slot_N),
                               pointer<T>(again_NF), of.first, c.sorted.begin_E1.size(0) - 1,
                               pointer<std::int32_t>(c.sorted.begin_E1), pointer<T>(c.weights.down_bias_EM),
                               pointer<A>(c.weight_RK), pointer<T>(part.act_NF), pointer<T>(part.rows_NM),
                               pointer<A>(c.grad_weight_RK));
    });
  }
  swiglu_operations().swiglu_backward(c.weights.activation, part.gate_up_NW, part.act_NF, part.grad_gate_up_NW,
                                      part.act_NF);
}

// grad_gate_up, act and grad_weight of a part from act's gradient, which act holds.
void differentiate_activation(const BackwardCall& c, const Part& part, Places of) {
  if (!is_plain(c.weights)) return differentiate_other_activation(c, part, of);
  const at::Tensor &weight_RK = c.weight_RK, &grad_weight_RK = c.grad_weight_RK;
  swiglu_operations().swiglu_backward({}, part.gate_up_NW, part.act_NF, part.grad_gate_up_NW, part.act_NF);
  if (!weight_RK.defined()) return;
  dispatch(part.act_NF.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    weigh_expert_gradient<T>(part.act_NF.size(0), part.act_NF.size(1), pointer<std::int32_t>(part.slot_N),
                             pointer<T>(part.gate_up_NW), pointer<A>(weight_RK), pointer<T>(part.grad_gate_up_NW),
                             pointer<T>(part.act_NF), pointer<A>(grad_weight_RK));
  });
}

// y += the experts' biases; undefined: none.
void add_biases(const SortedSlots& sorted, const at::Tensor& bias_EW, Places of, const at::Tensor& y_NW) {
  if (!bias_EW.defined()) return;
  dispatch(y_NW.scalar_type(), [&]<class T>() {
    add_expert_bias<T>(of.count, y_NW.size(1), of.first, bias_EW.size(0), pointer<std::int32_t>(sorted.begin_E1),
                       pointer<T>(bias_EW), pointer<T>(y_NW));
  });
}

// grad_bias_e += column sums of grad; undefined: it has no gradient.
void add_bias_gradient(const at::Tensor& grad_bias_EW, std::int64_t e, const at::Tensor& grad_NW) {
  if (!grad_bias_EW.defined()) return;
  product_operations().add_linear_grad_weight({}, grad_bias_EW.select(0, e), grad_NW, {}, {});
}

namespace one_by_one {

void forward(const ForwardCall& c) {
  Begins(c.sorted).for_each_expert(
      {0, c.sorted.slot_S.size(0)}, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
        const Part part = part_of(c.sorted, c.gate_up_SW, c.scratch, {first, N});  // rows: x, then the result
        moving_operations().gather(c.x_RM, part.row_N, part.rows_NM);
        multiply(part.gate_up_NW, part.rows_NM, c.weights.gate_up_EWM.select(0, e).t(), false);
        add_biases(c.sorted, c.weights.gate_up_bias_EW, {first, N}, part.gate_up_NW);
        if (!c.sum_RM.defined()) return;
        swiglu_operations().swiglu(c.weights.activation, part.gate_up_NW, part.act_NF);
        multiply(part.rows_NM, part.act_NF, c.weights.down_EMF.select(0, e).t(), false);
        add_biases(c.sorted, c.weights.down_bias_EM, {first, N}, part.rows_NM);
        add_rows_of_expert(part.rows_NM, part.row_N, part.slot_N, c.weight_RK, c.sum_RM);
      });
}

void backward(const BackwardCall& c) {
  const MovingOperations moving = moving_operations();
  Begins(c.sorted).for_each_expert(
      {0, c.sorted.slot_S.size(0)}, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
        // rows: dL/dsum, then x, then dL/dx
        const Part part = part_of(c.sorted, c.gate_up_SW, c.scratch, {first, N});
        moving.gather(c.grad_sum_RM, part.row_N, part.rows_NM);
        multiply(part.act_NF, part.rows_NM, c.weights.down_EMF.select(0, e), false);
        differentiate_activation(c, part, {first, N});
        if (c.grads.down_EMF.defined()) multiply(c.grads.down_EMF.select(0, e), part.rows_NM.t(), part.act_NF, true);
        add_bias_gradient(c.grads.down_bias_EM, e, part.rows_NM);
        add_bias_gradient(c.grads.gate_up_bias_EW, e, part.grad_gate_up_NW);
        if (c.grads.gate_up_EWM.defined()) {
          moving.gather(c.x_RM, part.row_N, part.rows_NM);
          multiply(c.grads.gate_up_EWM.select(0, e), part.grad_gate_up_NW.t(), part.rows_NM, true);
        }
        multiply(part.rows_NM, part.grad_gate_up_NW, c.weights.gate_up_EWM.select(0, e), false);
        add_rows_of_expert(part.rows_NM, part.row_N, part.slot_N, at::Tensor(), c.grad_x_sum_RM);
      });
}

}  // namespace one_by_one

namespace grouped {

// Calls visit(window, end_E) for windows of as many slots as there are rows of scratch.
template <class Visit>
void for_each_window(const SortedSlots& sorted, std::int64_t most, Visit visit) {
  const std::int64_t slots = sorted.slot_S.size(0), experts = sorted.begin_E1.size(0) - 1;
  for (std::int64_t first = 0; first < slots; first += most) {
    const Places window{first, std::min(most, slots - first)};
    const Scratch<std::int32_t> ends(experts);
    find_ends(experts, window, pointer<std::int32_t>(sorted.begin_E1), ends.get());
    visit(window, at::from_blob(ends.get(), {experts}, at::TensorOptions().dtype(at::kInt)));
  }
}

void forward(const ForwardCall& c) {
  const PlacedSlots placed(c.sorted);
  for_each_window(c.sorted, c.scratch.rows_RM.size(0), [&](Places window, const at::Tensor& end_E) {
    const Part part = part_of(c.sorted, c.gate_up_SW, c.scratch, window);  // rows: x
    moving_operations().gather(c.x_RM, part.row_N, part.rows_NM);
    {  // The backward reads gate_up where the layer keeps it. The product's own memory goes before the next one.
      const at::Tensor gate_up_NW = multiply_grouped(part.rows_NM, c.weights.gate_up_EWM.transpose(1, 2), end_E);
      copy_on_device(part.gate_up_NW.data_ptr(), gate_up_NW.data_ptr(), gate_up_NW.nbytes());
    }
    add_biases(c.sorted, c.weights.gate_up_bias_EW, window, part.gate_up_NW);
    if (!c.sum_RM.defined()) return;
    swiglu_operations().swiglu(c.weights.activation, part.gate_up_NW, part.act_NF);
    const at::Tensor result_NM = multiply_grouped(part.act_NF, c.weights.down_EMF.transpose(1, 2), end_E);
    add_biases(c.sorted, c.weights.down_bias_EM, window, result_NM);
    placed.add(window, result_NM, c.weight_RK, c.sum_RM);
  });
}

void backward(const BackwardCall& c) {
  const MovingOperations moving = moving_operations();
  Begins begins(c.sorted);
  const PlacedSlots placed(c.sorted);
  for_each_window(c.sorted, c.scratch.rows_RM.size(0), [&](Places window, const at::Tensor& end_E) {
    Part part = part_of(c.sorted, c.gate_up_SW, c.scratch, window);  // rows: dL/dsum, then x
    const auto entries = [&](const at::Tensor& x, std::int64_t first, std::int64_t count) {
      return x.narrow(0, first - window.first, count);
    };
    moving.gather(c.grad_sum_RM, part.row_N, part.rows_NM);
    part.act_NF = multiply_grouped(part.rows_NM, c.weights.down_EMF, end_E);
    differentiate_activation(c, part, window);
    if (c.grads.down_bias_EM.defined() || c.grads.gate_up_bias_EW.defined())
      begins.for_each_expert(window, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
        add_bias_gradient(c.grads.down_bias_EM, e, entries(part.rows_NM, first, N));
        add_bias_gradient(c.grads.gate_up_bias_EW, e, entries(part.grad_gate_up_NW, first, N));
      });
    if (c.grads.down_EMF.defined())
      begins.for_each_expert(window, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
        multiply(c.grads.down_EMF.select(0, e), entries(part.rows_NM, first, N).t(), entries(part.act_NF, first, N),
                 true);
      });
    if (c.grads.gate_up_EWM.defined()) {
      moving.gather(c.x_RM, part.row_N, part.rows_NM);
      begins.for_each_expert(window, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
        multiply(c.grads.gate_up_EWM.select(0, e), entries(part.grad_gate_up_NW, first, N).t(),
                 entries(part.rows_NM, first, N), true);
      });
    }
    const at::Tensor grad_x_NM = multiply_grouped(part.grad_gate_up_NW, c.weights.gate_up_EWM, end_E);
    placed.add(window, grad_x_NM, at::Tensor(), c.grad_x_sum_RM);
  });
}

}  // namespace grouped

// Products from rows of M to 2 F, from F to M, and back. Weights stand behind other parameters, of any size: grouped
// products take those that begin at a multiple of 16 bytes.
bool runs_grouped(const at::Tensor& x_RM, const ExpertWeights& weights) {
  const auto aligned = [](const at::Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0; };
  return has_grouped_products(x_RM.scalar_type(), weights.down_EMF.size(1), weights.down_EMF.size(2)) &&
         aligned(weights.gate_up_EWM) && aligned(weights.down_EMF);
}

void add_experts(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                 const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& sum_RM,
                 const ExpertScratch& scratch) {
  if (sorted.slot_S.size(0) == 0) return;
  const ForwardCall call{sorted, weights, x_RM, weight_RK, gate_up_SW, sum_RM, scratch};
  runs_grouped(x_RM, weights) ? grouped::forward(call) : one_by_one::forward(call);
}

void add_experts_backward(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                          const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& grad_sum_RM,
                          const ExpertWeights& grads, const at::Tensor& grad_x_sum_RM, const at::Tensor& grad_weight_RK,
                          const ExpertScratch& scratch) {
  if (sorted.slot_S.size(0) == 0) return;
  const BackwardCall call{sorted,      weights, x_RM,          weight_RK,      gate_up_SW,
                          grad_sum_RM, grads,   grad_x_sum_RM, grad_weight_RK, scratch};
  runs_grouped(x_RM, weights) ? grouped::backward(call) : one_by_one::backward(call);
}

void round(const at::Tensor& base_RM, const at::Tensor& sum_RM, const at::Tensor& out_RM) {
  dispatch(out_RM.scalar_type(), [&]<class T>() {
    round_sum<T>(out_RM.numel(), pointer<T>(base_RM), pointer<accumulator_t<T>>(sum_RM), pointer<T>(out_RM));
  });
}

}  // namespace

ExpertOperations expert_operations() {
  return {choose,   backward, scale_weights, scale_weights_backward, sort, add_experts, add_experts_backward,
          add_rows, round};
}

}  // namespace espalier::cuda
