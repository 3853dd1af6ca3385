// The columns of z and a are products with latents of the row:  z = (n Wl^T) Wz^T,  a = (n Wl^T) Wa^T.
#include "espalier/mixers/recurrence/layer.h"
#include "espalier/mixers/kimi_delta/shape.h"

namespace espalier {
namespace {

// The latents of z and a, side by side.
struct Latents {
  at::Tensor of_z_TC, of_a_TC;

  explicit Latents(const at::Tensor& both_TC)
      : of_z_TC(both_TC.narrow(1, 0, both_TC.size(1) / 2)),
        of_a_TC(both_TC.narrow(1, both_TC.size(1) / 2, both_TC.size(1) / 2)) {}
};

// The columns of projected rows that are products with rows, and the columns of z and a.
struct Columns {
  at::Tensor of_rows_TW, z_TV, a_TA;

  Columns(const RecurrenceShape& s, const at::Tensor& projected_TW) {
    const std::int64_t first = s.projected_from_rows();
    of_rows_TW = projected_TW.narrow(1, 0, first);
    z_TV = projected_TW.narrow(1, first, s.value_width());
    a_TA = projected_TW.narrow(1, first + s.value_width(), s.decays());
  }
};

// The weights of the projections, or their gradients.
struct Views {
  explicit Views(const PartViews& views)
      : projected(views.products[KimiDelta::projected]),
        latents(views.products[KimiDelta::gate_latents]),
        z(views.products[KimiDelta::gate_z]),
        a(views.products[KimiDelta::gate_a]) {}

  const Projection &projected, &latents, &z, &a;
};

class Forward final : public RecurrenceForward {
 public:
  using RecurrenceForward::RecurrenceForward;

 private:
  void project(const at::Tensor& input_TM) const override {
    const Columns columns(recurrence_of(c_).shape, saved_.projected_TW);
    const Views w(c_.weights.mixer);
    c_.products.linear(columns.of_rows_TW, input_TM, w.projected);
    c_.products.linear(saved_.latents_TC, input_TM, w.latents);
    const Latents latents(saved_.latents_TC);
    c_.products.linear(columns.z_TV, latents.of_z_TC, w.z);
    c_.products.linear(columns.a_TA, latents.of_a_TC, w.a);
  }
};

class Backward final : public RecurrenceBackward {
 public:
  using RecurrenceBackward::RecurrenceBackward;

 private:
  bool reads_input() const override { return Views(grads_).projected.trains() || Views(grads_).latents.trains(); }

  void add_project(const at::Tensor& grad_projected_TW, const at::Tensor& input_TM,
                   const at::Tensor& grad_input_TM) const override {
    const Views w(c_.weights.mixer), grads(grads_);
    const Columns grad(recurrence_of(c_).shape, grad_projected_TW);
    c_.products.add_linear_grad_weight(grads.projected, w.projected, grad.of_rows_TW, input_TM,
                                       held_[declared_.projected_product]);
    const at::Tensor grad_latents_TC = held_[declared_.grad_latents_TC];
    const Latents latents(saved_.latents_TC), grad_latents(grad_latents_TC);
    c_.products.add_linear_grad_weight(grads.z, w.z, grad.z_TV, latents.of_z_TC, held_[declared_.gates_product]);
    c_.products.add_linear_grad_weight(grads.a, w.a, grad.a_TA, latents.of_a_TC, held_[declared_.decays_product]);
    c_.products.linear_grad_input(grad_latents.of_z_TC, grad.z_TV, w.z);
    c_.products.linear_grad_input(grad_latents.of_a_TC, grad.a_TA, w.a);
    c_.products.add_linear_grad_weight(grads.latents, w.latents, grad_latents_TC, input_TM,
                                       held_[declared_.latents_product]);
    c_.products.linear_grad_input(grad_input_TM, grad.of_rows_TW, w.projected);
    c_.products.add_linear_grad_input(grad_input_TM, grad_latents_TC, w.latents);
  }
};

// Kimi Linear's heads.
KimiDelta usual(std::int64_t heads) {
  RecurrenceShape s;
  s.key_heads = s.value_heads = heads, s.key_dim = s.value_dim = s.gate_latent = 128, s.kernel = 4;
  return KimiDelta(s);
}

}  // namespace

extern const MixerLayer kimi_delta_layer;
const MixerLayer kimi_delta_layer = recurrence_layer<Forward, Backward, usual>();

}  // namespace espalier
