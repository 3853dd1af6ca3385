#include "espalier/model/sharded_buffers.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

std::int64_t whole_shares(const RowShares& shares) { return shares.ranks() * shares.most(); }

// The scratch of an addition to what expands latents.
void nest_expansion(BufferList& list, const BlockShape& b, std::int64_t block, auto stage) {
  if (b.layer.mixer->adapts_expansion(b.layer.adapted_alike)) list.nest(stage, low_rank_bytes(b, block));
}

// The widths of a row: of keys and of values, and of what ranks exchange, which is latents and shared keys where the
// mixer has these.
struct Widths {
  explicit Widths(const Mixer& mixer) {
    const std::vector<PathKind> of_heads = mixer.path_kinds(false), of_given = mixer.path_kinds(mixer.narrows_path());
    keys = of_heads[0].width, values = of_heads[1].width;
    first = of_given[0].width, second = of_given[1].width;
  }
  std::int64_t sum() const { return first + second; }

  std::int64_t keys, values, first, second;
};

}  // namespace

ShardedForwardBuffers::ShardedForwardBuffers(const BlockShape& b, const RowShares& shares, bool in_path)
    : BufferList(b.bytes) {
  const bool latents = b.layer.mixer->narrows_path();
  const std::int64_t most = shares.most(), all = whole_shares(shares), block = std::min(all, kLatentBlock);
  const Widths given(*b.layer.mixer);
  if (!in_path) {
    k_SW =
        add("keys of a set sharded over cp", shares.rows(), given.keys, kActivation, Stage::exchange, Stage::attention);
    v_SW = add("values of a set sharded over cp", shares.rows(), given.values, kActivation, Stage::exchange,
               Stage::attention);
  }
  if (latents) {
    latent_SC =
        add("latents of a set sharded over cp", all, given.first, kActivation, Stage::exchange, Stage::expansion);
    rotary_SK =
        add("shared keys of a set sharded over cp", all, given.second, kActivation, Stage::exchange, Stage::expansion);
    kv_BW = add("heads of a block of the set", block, b.layer.mixer->expanded_width(), kActivation, Stage::expansion);
    nest_expansion(*this, b, block, Stage::expansion);
  }
  part = add("this rank's rows", most, given.sum(), kActivation, Stage::exchange);
  whole = add("rows of all ranks", all, given.sum(), kActivation, Stage::exchange);
}

ShardedBackwardBuffers::ShardedBackwardBuffers(const BlockShape& b, const RowShares& shares, bool in_path)
    : BufferList(b.bytes) {
  const bool latents = b.layer.mixer->narrows_path();
  const Widths given(*b.layer.mixer);
  const std::int64_t K = given.keys, V = given.values, S = shares.rows(), most = shares.most(),
                     all = whole_shares(shares), block = std::min(all, kLatentBlock);
  const Stage last = latents ? Stage::latents : Stage::owners;  // that reads gradients of keys and values
  if (latents) {
    sum_latent_SC = add("sums for latents of the set", all, given.first, kAccumulator, Stage::exchange, Stage::owners);
    sum_rotary_SK =
        add("sums for shared keys of the set", all, given.second, kAccumulator, Stage::exchange, Stage::owners);
  }
  if (!in_path) {
    grad_k_SW = add("gradient of keys of a set sharded over cp", S, K, kAccumulator, Stage::exchange, last);
    grad_v_SW = add("gradient of values of a set sharded over cp", S, V, kAccumulator, Stage::exchange, last);
  }
  if (latents) {
    latent_SC = add("latents of a set sharded over cp", all, given.first, kActivation, Stage::exchange, Stage::latents);
    rotary_SK =
        add("shared keys of a set sharded over cp", all, given.second, kActivation, Stage::exchange, Stage::latents);
  }
  if (!in_path) {
    k_SW = add("keys of a set sharded over cp", S, K, kActivation, Stage::exchange, Stage::attention);
    v_SW = add("values of a set sharded over cp", S, V, kActivation, Stage::exchange, Stage::attention);
  }
  if (!in_path || latents) {
    part = add("this rank's rows", most, given.sum(), kActivation, Stage::exchange);
    whole = add("rows of all ranks", all, given.sum(), kActivation, Stage::exchange);
  }
  if (latents) {
    const std::int64_t KV = b.layer.mixer->expanded_width();
    if (!in_path) kv_BW = add("heads of a block of the set", block, KV, kActivation, Stage::expansion);
    grad_kv_BW = add("gradient of heads of a block", block, KV, kActivation, Stage::latents);
    grad_latent_BC = add("gradients of latents of a block", block, given.first, kActivation, Stage::latents);
    sum_latent_BC = add("sums for latents of a block", block, given.first, kAccumulator, Stage::latents);
    sum_rotary_BK = add("sums for shared keys of a block", block, given.second, kAccumulator, Stage::latents);
    product = add_product(*this, b, "product for keys and values", KV, given.first, Stage::latents);
    if (!in_path) nest_expansion(*this, b, block, Stage::expansion);
    nest_expansion(*this, b, block, Stage::latents);
  }
  grad_part = add("gradient of this rank's rows", most, given.sum(), kAccumulator, Stage::owners);
  grad_whole = add("gradient of rows for all ranks", all, given.sum(), kAccumulator, Stage::owners);
}

}  // namespace espalier
