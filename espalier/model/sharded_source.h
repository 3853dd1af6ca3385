// A set of rows over the open trunks, sharded over cp (program/row_shares.h). Each rank computes the queries, keys and
// values of its rows; keys and values of all rows are gathered, queries stay. Their gradients, including waves'
// contributions to a trunk, are reduced once to the rank that has the row.
//
// With latent attention the rows' latents and shared keys are gathered instead, which are several times narrower, and
// every rank expands all rows' latents to keys and values (model/path_latents.h). In the backward each rank takes the
// gradients that it has of all rows' keys and values through this expansion, and the gradients of latents are reduced.
//
// Every rank of the rank group calls the same functions, even without rows. Visibility: path_source.h. Shapes: T rows
// of this rank, S of the set, P rows of the path that they see, J key/value heads, D head size, C width of a latent, K
// of a shared key.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "espalier/device/arena.h"
#include "espalier/model/block_buffers.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/open_path.h"
#include "espalier/model/shared_states.h"
#include "espalier/parallel/group.h"
#include "espalier/program/row_shares.h"

namespace espalier {

// On the device, int32.
struct ShardedRows {
  at::Tensor row_S;         // rows of the set: rank 0's, rank 1's, ...
  at::Tensor own_T;         // this rank's rows of the set
  at::Tensor output_own_O;  // the set's row of each output of this rank
  at::Tensor counted_T;     // 0, 1, ... T-1
};

class ShardedSource final : public KvSource {
 public:
  // `is_trunk`: the path was last opened for these rows. The arguments must outlive the object; `dtype` is the dtype
  // of activations. `states`: of recurrent layers. subtree_end_S (int32) and depth_S (int32) are on the device; only
  // layers with a window read depth_S.
  ShardedSource(OpenPath& path, std::int64_t path_rows, bool is_trunk, at::Tensor subtree_end_S, at::Tensor depth_S,
                const RowShares& shares, const ShardedRows& rows, const BufferSizes& sizes, at::ScalarType dtype,
                Group& cp, Arena& arena, std::optional<SharedStates> states = {});

  std::int64_t states() const override { return states_ ? states_->states() : 0; }
  void run_states(std::int64_t layer, const at::Tensor& states_FN, const RowsOfRuns& compute) override {
    states_->run_states(layer, states_FN, compute);
  }
  void run_states_backward(const Operations& ops, std::int64_t layer, const at::Tensor& states_FN,
                           const at::Tensor& grad_states_FN, const RowsOfRuns& again,
                           const RowsOfRuns& compute) override {
    states_->run_states_backward(ops, layer, states_FN, grad_states_FN, again, compute);
  }
  bool divides() const override { return true; }
  OpenPath* path_of_latents() const override { return path_.carries_latents() ? &path_ : nullptr; }
  std::int64_t path_rows() const override { return path_rows_; }
  std::int64_t path_rows_with_own() const override { return is_trunk_ ? path_.rows() : path_rows_; }
  void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) override;
  void add_backward(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR,
                    const at::Tensor& grad_attended_RW, const at::Tensor& grad_q_RW,
                    const KeysValues& grad_own) override;

 private:
  BlockShape block(const LayerAttention& attention) const { return {sizes_, sizes_.shape.at(attention.layer)}; }
  // In a buffer of several ranks' parts, the first rows of part `place`: [rows, J*D] and [rows, J*Dv], or of latents
  // [rows, C] and [rows, K].
  KeysValues parts_of(const LayerAttention& attention, const at::Tensor& whole, std::int64_t place,
                      std::int64_t rows) const;
  at::Tensor set_rows_of(std::int64_t rank) const;
  // Writes what this rank gives to the others.
  void give_own(const LayerAttention& attention, const KeysValues& given) const;
  void gather(const LayerAttention& attention, const at::Tensor& part, const at::Tensor& whole,
              const KeysValues& set) const;
  // The set's latents: a trunk's in a path that carries them, or in the buffers.
  OpenPath::Latents latents_of_set(const LayerAttention& attention, const at::Tensor& latent_SC,
                                   const at::Tensor& rotary_SK) const;
  // Reduces the set's gradients to the ranks that have the rows, where they are added to grad_own, or overwrite it if
  // they are of latents.
  void give_to_owners(const LayerAttention& attention, const KeysValues& grad_set, const at::Tensor& part,
                      const at::Tensor& whole, const KeysValues& grad_own) const;
  AttentionProblem problem(const LayerAttention& attention, const KeysValues& set, const OpenPath::Layer& path) const;

  OpenPath& path_;
  std::int64_t path_rows_;
  bool is_trunk_;
  at::Tensor subtree_end_S_, depth_S_;
  RowShares shares_;
  const ShardedRows& rows_;
  BufferSizes sizes_;
  at::ScalarType dtype_;
  Group& cp_;
  Arena& arena_;
  std::optional<SharedStates> states_;  // of recurrent layers
  std::int64_t kept_layers_ = 0;        // for a trunk: layers with keys and values in the path
};

}  // namespace espalier
