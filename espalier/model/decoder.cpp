#include "espalier/model/decoder.h"

#include <ATen/ATen.h>

#include "espalier/base/mutation.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/row_kernels.h"

namespace espalier {

namespace {

// As nn.Embedding(padding_idx): what comes to a look-up of this token is dropped.
void drop_look_ups(std::int64_t token, const std::vector<std::int32_t>& id_T, at::Tensor& grad_stream_TM) {
  std::vector<std::int64_t> rows;
  for (std::size_t row = 0; row < id_T.size(); ++row)
    if (id_T[row] == token) rows.push_back(static_cast<std::int64_t>(row));
  if (!rows.empty()) grad_stream_TM.index_fill_(0, at::tensor(rows, at::kLong), 0);
}

}  // namespace

Decoder::Decoder(const ModelShape& shape, ModelViews weights) : shape_(shape), weights_(std::move(weights)) {}

void Decoder::reserve_positions(std::int64_t positions) {
  if (positions > rotary_.positions()) rotary_ = make_rotary_tables(shape_, positions, accumulator_type(dtype()));
}

bool Decoder::last_block_is_narrow(const Rows& rows) const {
  return rows.accounting == nullptr || !rows.accounting->needs_all_rows() || !shape_.has_experts(shape_.layers - 1);
}

LayerContext Decoder::context(const Rows& rows, KvPath& path, std::int64_t layer, Arena& arena, Timer* timer) const {
  return {shape_, weights_.layers[static_cast<std::size_t>(layer)],         rotary_, rows, path,
          layer,  layer + 1 == shape_.layers && last_block_is_narrow(rows), arena,   timer};
}

DecoderSaved Decoder::forward(const Rows& rows, KvPath& path, Keep keep, Arena& arena, Timer* timer) const {
  const TimedPart timed(timer, part::kRows);
  DecoderSaved out;
  out.keep = keep;
  if (rows.outputs() > 0) {
    out.final_stream_OM = arena.take({rows.outputs(), shape_.hidden}, dtype());
    out.normed_OM = arena.take({rows.outputs(), shape_.hidden}, dtype());
    out.final_rstd_O = arena.take({rows.outputs()}, accumulator_type(dtype()));
  }
  const std::int64_t kept_from = arena.in_use();
  at::Tensor stream_TM = arena.take({rows.rows(), shape_.hidden}, dtype());
  dispatch(dtype(), [&]<class T>() {
    rows::gather<T>(rows.rows(), shape_.hidden, pointer<T>(weights_.embedding_VM), rows.id.data(),
                    pointer<T>(stream_TM));
  });
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
    const LayerContext c = context(rows, path, layer, arena, timer);
    at::Tensor next = c.last ? out.final_stream_OM : stream_TM;
    if (keep != Keep::nothing && !c.last) next = arena.take(stream_TM.sizes(), dtype());
    const std::int64_t mark = arena.in_use();
    LayerSaved saved = take_layer_saved(c, stream_TM);
    layer_forward(c, saved, next);
    if (keep != Keep::everything) {
      arena.release_to(mark);
      saved = LayerSaved{};
      saved.stream_in_TM = stream_TM;
    }
    if (keep != Keep::nothing) out.layers.push_back(std::move(saved));
    stream_TM = next;
  }
  if (!last_block_is_narrow(rows) && rows.outputs() > 0)
    dispatch(dtype(), [&]<class T>() {
      rows::gather<T>(rows.outputs(), shape_.hidden, pointer<T>(stream_TM), rows.output_row.data(),
                      pointer<T>(out.final_stream_OM));
    });
  if (keep == Keep::nothing) arena.release_to(kept_from);
  if (rows.outputs() > 0)
    dispatch(dtype(), [&]<class T>() {
      rows::rms_norm<T>(rows.outputs(), shape_.hidden, pointer<T>(out.final_stream_OM),
                        pointer<T>(weights_.final_norm_M), shape_.rms_norm_eps, pointer<T>(out.normed_OM),
                        pointer<accumulator_t<T>>(out.final_rstd_O));
    });
  return out;
}

void Decoder::backward(const Rows& rows, KvPath& path, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                       ModelViews& grads, Arena& arena, Timer* timer) const {
  const TimedPart timed(timer, part::kRows);
  const ArenaScope scope(arena);
  at::Tensor grad_stream = arena.take({rows.outputs(), shape_.hidden}, dtype()).zero_();
  if (rows.outputs() > 0)
    dispatch(dtype(), [&]<class T>() {
      rows::rms_norm_backward<T>(rows.outputs(), shape_.hidden, pointer<T>(saved.final_stream_OM),
                                 pointer<T>(weights_.final_norm_M), pointer<accumulator_t<T>>(saved.final_rstd_O),
                                 pointer<T>(grad_normed_OM), pointer<T>(grad_stream),
                                 pointer<accumulator_t<T>>(grads.final_norm_M));
    });
  if (!last_block_is_narrow(rows)) {
    const at::Tensor grad_stream_TM = arena.take({rows.rows(), shape_.hidden}, dtype()).zero_();
    dispatch(dtype(), [&]<class T>() {
      rows::scatter_add<T, T>(rows.outputs(), shape_.hidden, pointer<T>(grad_stream), rows.output_row.data(),
                              pointer<T>(grad_stream_TM));
    });
    grad_stream = grad_stream_TM;
  }
  for (std::int64_t layer = shape_.layers - 1; layer >= 0; --layer) {
    const LayerContext c = context(rows, path, layer, arena, timer);
    LayerSaved& kept = saved.layers[static_cast<std::size_t>(layer)];
    // The last block widens the gradient from output rows to all rows: that tensor must outlive its scratch.
    at::Tensor widened;
    if (c.last) widened = arena.take({rows.rows(), shape_.hidden}, dtype());
    {
      const ArenaScope layer_scope(arena);
      if (saved.keep == Keep::streams) {
        if (ESPALIER_MUTATION(recompute_with_stale_input)) kept.stream_in_TM = saved.layers.front().stream_in_TM;
        kept = take_layer_saved(c, kept.stream_in_TM);
        layer_forward(c, kept, at::Tensor());
      }
      layer_backward(c, kept, grad_stream, c.last ? widened : grad_stream,
                     grads.layers[static_cast<std::size_t>(layer)]);
    }
    if (c.last) grad_stream = widened;
  }
  drop_look_ups(shape_.pad_token, rows.id, grad_stream);
  if (ESPALIER_MUTATION(embedding_repeat_lost)) grads.embedding_VM.index_fill_(0, at::tensor(rows.id, at::kLong), 0);
  dispatch(dtype(), [&]<class T>() {
    rows::scatter_add<T, accumulator_t<T>>(rows.rows(), shape_.hidden, pointer<T>(grad_stream), rows.id.data(),
                                           pointer<accumulator_t<T>>(grads.embedding_VM));
  });
}

}  // namespace espalier
