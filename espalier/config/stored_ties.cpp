#include "espalier/config/stored_ties.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "espalier/config/stored_headers.h"
#include "espalier/config/stored_values.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

bool differ(const StoredTensor& a, const StoredTensor& b) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  if (a.shape != b.shape || a.shape[0] <= 0 || a.shape[1] <= 0) return false;
  const std::size_t count = static_cast<std::size_t>(a.shape[0]) * static_cast<std::size_t>(a.shape[1]);
  for (const StoredTensor* one : {&a, &b})
    if (StoredValues(*one).count() != count) return false;
  StoredValues left(a), right(b);
  for (std::size_t done = 0; done < count; done += kPiece) {
    const std::size_t size = std::min(kPiece, count - done);
    if (!left.read(size) || !right.read(size)) return false;
    if (a.dtype == b.dtype && left.bytes() == right.bytes()) continue;
    for (std::size_t i = 0; i < size; ++i)
      if (left[i] != right[i]) return true;
  }
  return false;
}

}  // namespace

void untie_differing_head(const fs::path& directory, Json& config) {
  if (!config.is_object()) return;
  const auto tied = config.find("tie_word_embeddings");
  if (tied != config.end() && *tied == false) return;
  StoredHeaders headers(directory);
  const auto head = headers.matrix([](std::string_view name) { return name.ends_with("lm_head.weight"); });
  if (!head) return;
  // Layers that predict further tokens may have embeddings of their own.
  const auto embedding = headers.matrix([](std::string_view name) {
    return (name.ends_with("embed_tokens.weight") || name == "backbone.embeddings.weight" ||
            name == "model.word_embeddings.weight") &&
           name.find("layers.") == name.npos;
  });
  if (embedding && differ(*embedding, *head)) config["tie_word_embeddings"] = false;
}

}  // namespace espalier
