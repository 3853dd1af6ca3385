// One complete save as a trainer makes it: weights in two shards and the run state, swapped in as a whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/mixers/attention/shape.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {

inline ModelShape saved_shape() {
  ModelShape shape = llama_shape();
  shape.hidden = 64;
  shape.layer = attention_layers(2, {.heads = 4, .kv_heads = 2, .head_dim = 16}, 96);
  return shape;
}

inline void save_version(const std::filesystem::path& source, const std::filesystem::path& target,
                         std::int64_t version) {
  const ModelShape shape = saved_shape();
  const ParameterTable table(shape);
  const std::vector<float> values(static_cast<std::size_t>(table.size()), static_cast<float>(version));
  RunState state;
  state.step = version;
  state.model = fingerprint_of(shape);
  AtomicDirectory out(target);
  write_model_directory(out.path(), source, table, DType::float32, values.data(), DType::float32,
                        {.shard_bytes = table.size() * 2, .changed = {}, .progress = {}});
  save_run_state(out.path(), state, table, values.data(), values.data(), values.data());
  out.commit();
}

}  // namespace espalier::test
