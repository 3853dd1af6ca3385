#include "espalier/config/stored_scales.h"

#include <cmath>
#include <string>

#include "espalier/base/error.h"
#include "espalier/config/stored_values.h"

namespace espalier {

void set_stored_scales(const std::filesystem::path& directory, ModelShape& shape) {
  if (shape.names.output_scale[0] == '\0') return;
  StoredHeaders headers(directory);
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    const std::string name = text_of("layers.", layer, ".", shape.names.output_scale);
    const std::optional<StoredTensor> found =
        headers.tensor([&](std::string_view stored) { return stored == name || stored.ends_with("." + name); });
    if (!found) continue;
    StoredValues values(*found);
    if (values.count() != 1 || !values.read(1) || !std::isfinite(values[0]))
      throw InputError({found->file.string() + ": tensor '" + name + "'", "one finite number",
                        "another shape, type or value", "Fetch the model again"});
    shape.layer[static_cast<std::size_t>(layer)].output_scale.value = values[0];
  }
}

}  // namespace espalier
