#include "espalier/train/merge.h"

#include <string>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/train/trained_model.h"

namespace espalier {

MergeReport merge(const std::filesystem::path& directory, const Options& options, Progress& progress) {
  const ClaimedDirectory claimed(options.out, options.overwrite);
  ModelShape shape = read_model_shape(options.model);
  shape.stored_dtype = stored_dtype(options.model).value_or(shape.stored_dtype);
  const DType to = saved_dtype(options.save_dtype, shape);
  const ParameterTable table(shape);
  const StoredTensors stored(options.model, table);
  const Adapter adapter(directory, table);
  require_disk_space({{options.out, table.size() * bytes_of(to)}});
  std::vector<double> values;
  const ParameterValues merged = [&](const Parameter& parameter) -> const void* {
    const SafetensorsEntry& entry = stored.at(parameter.name);
    values.resize(static_cast<std::size_t>(parameter.count));
    convert_values(entry.type, entry.data, DType::float64, values.data(), parameter.count);
    forget_pages(entry);
    adapter.apply(parameter.name, values);
    return values.data();
  };
  AtomicDirectory out(options.out);
  progress.begin("merging", table.size(), "parameters");
  write_model_directory(out.path(), options.model, table, DType::float64, merged, to,
                        {.stored = &stored,
                         .changed = [&](const std::string& name) { return adapter.changes(name); },
                         .progress = [&](std::int64_t done, std::int64_t) { progress.advance_to(done); }});
  out.commit();
  progress.end();
  return {adapter.changed(), static_cast<std::int64_t>(table.parameters().size()), adapter.rank(), adapter.scale()};
}

}  // namespace espalier
