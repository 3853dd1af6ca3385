#include "espalier/merge/merge.h"

#include <optional>
#include <string>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/train/trained_model.h"

namespace espalier {
namespace {

// The shape for a critic's or a reward model's adapter has the value head, which a language model lacks.
ModelShape merged_shape(const std::filesystem::path& adapter, const std::filesystem::path& model) {
  if (is_reward_adapter(adapter)) return read_reward_shape(model).shape;
  return is_critic_adapter(adapter) ? read_critic_shape(model).shape : read_model_shape(model);
}

bool is_of_head(const std::string& name) { return name == kValueWeight || name == kValueBias; }

}  // namespace

MergeReport merge(const std::filesystem::path& directory, const Options& options, Progress& progress) {
  const ClaimedDirectory claimed(options.out, options.overwrite);
  ModelShape shape = merged_shape(directory, options.model);
  shape.stored_dtype = stored_dtype(options.model).value_or(shape.stored_dtype);
  const DType to = saved_dtype(options.save_dtype, shape);
  const ParameterTable table(shape);
  const Adapter adapter(directory, shape);
  if (adapter.changes_tied_head())
    throw UnsupportedError({directory.string() + ": lm_head", "a head of its own in " + options.model,
                            "one that is the embedding, which the adapter does not change",
                            "score and sample with --adapter; or save the model with tie_word_embeddings false"});
  std::optional<StoredTensors> checked;
  const bool brings_head = shape.value_head && adapter.changes(kValueWeight);
  brings_head ? checked.emplace(options.model) : checked.emplace(options.model, table);
  const StoredTensors& stored = *checked;
  require_disk_space({{options.out, table.size() * bytes_of(to)}});
  std::vector<double> values;
  std::vector<std::byte> room;
  const ParameterValues merged = [&](const Parameter& parameter) -> const void* {
    values.assign(static_cast<std::size_t>(parameter.count), 0);
    if (!is_of_head(parameter.name) || stored.has(parameter.name)) {
      const SafetensorsEntry& entry = stored.at(parameter.name);
      convert_values(entry.type, values_of(entry, room), DType::float64, values.data(), parameter.count);
      forget_pages(entry);
    }
    if (adapter.changes(parameter.name)) adapter.apply(parameter.name, values);
    return values.data();
  };
  AtomicDirectory out(options.out);
  progress.begin("merging", table.size(), "parameters");
  write_model_directory(
      out.path(), options.model, table, DType::float64, merged, to,
      {.stored = &stored,
       .changed =
           [&](const std::string& name) { return adapter.changes(name) || (is_of_head(name) && !stored.has(name)); },
       .of_sequences = scores_sequences(shape),
       .progress = [&](std::int64_t done, std::int64_t) { progress.advance_to(done); }});
  out.commit();
  progress.end();
  return {adapter.changed(), static_cast<std::int64_t>(table.parameters().size()), adapter.rank(), adapter.scale()};
}

}  // namespace espalier
