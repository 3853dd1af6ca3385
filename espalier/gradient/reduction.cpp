#include "espalier/gradient/reduction.h"

#include <algorithm>
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
      table.divided() ? gradients.kept(table.parameters().front()).unsqueeze(0) : views.embedding_VM;
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

void sum_over_replicas(GradientSet& gradients, const Mesh& mesh) {
  const at::Tensor& flat = gradients.flat();
  const std::int64_t bucket = kBucketBytes / static_cast<std::int64_t>(flat.element_size());
  const auto sum_run = [&](std::int64_t first, std::int64_t count, bool divided) {
    Group& holders = divided ? mesh.expert_replicas : mesh.replicas;
    for (std::int64_t begin = 0; begin < count; begin += bucket)
      holders.add_over_ranks(flat.narrow(0, first + begin, std::min(bucket, count - begin)));
  };
  for_each_run(
      gradients.table(), [&](const Parameter& p) { return p.shard.of_expert && mesh.degrees.ep > 1; }, sum_run);
}

}  // namespace

void sum_over_ranks(GradientSet& gradients, const Mesh& mesh) {
  if (!gradients.table().divided()) sum_over_replicas(gradients, mesh);
  add_tied_embedding(gradients, mesh.pp, gradients.device());
}

}  // namespace espalier
