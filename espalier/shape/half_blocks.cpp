#include "espalier/shape/half_blocks.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "espalier/base/error.h"

namespace espalier {

std::vector<HalfBlocks> read_half_blocks(const Members& config) {
  constexpr const char *kTypes = "layers_block_type", *kPattern = "hybrid_override_pattern";
  const char* const member = config.has(kTypes) || !config.has(kPattern) ? kTypes : kPattern;
  std::vector<std::string> entries;
  if (member == kTypes) {
    if (!config.has(kTypes) || !config.at(kTypes).is_array()) config.fail(kTypes, "a list of names of layers");
    for (const Json& entry : config.at(kTypes)) entries.push_back(entry.is_string() ? entry.get<std::string>() : "");
  } else {
    for (const char letter : config.text(kPattern, "")) entries.emplace_back(1, letter);
  }
  const auto one_of = [](const std::string& entry, std::initializer_list<const char*> names) {
    return std::ranges::any_of(names, [&](const char* name) { return entry == name; });
  };
  std::vector<HalfBlocks> blocks;
  for (const std::string& entry : entries) {
    const bool recurrent = one_of(entry, {"M", "linear_attention", "mamba"}), experts = one_of(entry, {"E", "moe"});
    if (recurrent || one_of(entry, {"*", "full_attention", "attention"})) {
      blocks.push_back({recurrent});
    } else if (experts || one_of(entry, {"-", "mlp"})) {
      if (blocks.empty() || blocks.back().mlp != MlpKind::none)
        config.refuse(text_of("an MLP in ", member, " without a mixer right before it"),
                      "MLPs that follow Mamba-2 or attention");
      blocks.back().mlp = experts ? MlpKind::experts : MlpKind::dense;
    } else {
      config.refuse(text_of("'", entry, "' in ", member), "layers of Mamba-2, attention, MLPs and experts");
    }
  }
  if (std::ranges::none_of(blocks, &HalfBlocks::recurrent)) config.fail(member, "layers of Mamba-2");
  return blocks;
}

}  // namespace espalier
