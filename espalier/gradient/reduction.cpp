#include "espalier/gradient/reduction.h"

#include <numeric>
#include <vector>

#include "espalier/device/control_block.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

// Both have computed a part of it: one from look-ups, one from the head.
void add_tied_embedding(GradientSet& gradients, Group& pp, Device& device) {
  const ModelViews& views = gradients.views();
  if (pp.size() == 1 || !views.embedding_VM.defined() || !views.head_VM.is_same(views.embedding_VM)) return;
  const ParameterTable& table = gradients.table();
  const at::Tensor own_VM =
      table.sharded() ? gradients.kept(table.parameters().front()).unsqueeze(0) : views.embedding_VM;
  if (own_VM.numel() == 0) return;
  const int other = pp.rank() == 0 ? pp.size() - 1 : 0;
  const at::Tensor others_VM = device.allocate(own_VM.sizes(), own_VM.scalar_type());
  pp.send(own_VM, other);
  pp.receive(others_VM, other);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(own_VM.size(0)));
  std::iota(rows.begin(), rows.end(), 0);
  at::Tensor row_V;
  ControlBlock block;
  block.add(rows, row_V);
  block.hand_over(device);
  device.operations().add_scatter(others_VM, row_V, own_VM);
}

}  // namespace

void sum_over_ranks(GradientSet& gradients, const Mesh& mesh) {
  gradients.finish_sums();
  gradients.add_shares(mesh.tp);
  add_tied_embedding(gradients, mesh.pp, gradients.device());
}

}  // namespace espalier
