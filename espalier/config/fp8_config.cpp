#include "espalier/config/fp8_config.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/fp8.h"

namespace espalier {
namespace {

constexpr const char* kRemedy =
    "Widen the weights once: load the model with transformers in bfloat16 (FineGrainedFP8Config(dequantize=True) for "
    "method fp8) and call save_pretrained";
constexpr const char* kPlace = "quantization_config.";

// Members of quantization_config, or of an object in it.
class Stated {
 public:
  Stated(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  const Json& at(const char* name) const {
    static const Json null;
    const auto found = json_.is_object() ? json_.find(name) : json_.end();
    return found == json_.end() ? null : *found;
  }
  bool has(const char* name) const { return json_.is_object() && json_.contains(name); }

  [[noreturn]] void fail(const std::string& member, const std::string& expected) const {
    throw InputError({where_ + ": " + kPlace + member, expected, at(member.c_str()).dump(), ""});
  }
  [[noreturn]] void refuse(const std::string& member, const std::string& expected, const std::string& got) const {
    throw UnsupportedError({where_ + ": " + kPlace + member, expected, got, kRemedy});
  }
  // `got`: of the member
  void require(bool fine, const std::string& member, const std::string& expected) const {
    if (!fine) refuse(member, expected, at(member.c_str()).dump());
  }

  std::vector<std::string> names(const char* member) const {
    const Json& list = at(member);
    if (list.is_null()) return {};
    if (!list.is_array() || !std::ranges::all_of(list, [](const Json& name) { return name.is_string(); }))
      fail(member, "a list of names of modules");
    return list.get<std::vector<std::string>>();
  }

  // Rows and columns with one scale.
  quantised::Form blocks(const char* member) const {
    const Json& sizes = at(member);
    const auto is_size = [](const Json& size) {
      return size.is_number_integer() && size >= 1 && size <= fp8::kMostColumns;
    };
    if (!sizes.is_array() || sizes.size() != 2 || !std::ranges::all_of(sizes, is_size))
      fail(member, text_of("two numbers from 1 to ", fp8::kMostColumns));
    return {.kind = quantised::Kind::fp8,
            .block_rows = sizes[0].get<std::int32_t>(),
            .block_columns = sizes[1].get<std::int32_t>()};
  }

 private:
  const Json& json_;
  std::string where_;
};

constexpr quantised::Form kRowByRow{.kind = quantised::Kind::fp8, .block_rows = 1, .block_columns = fp8::kWholeRow};

StoredQuantised of_method_fp8(const Stated& stated) {
  const Json &format = stated.at("fmt"), &experts = stated.at("expert_dtype"),
             &further = stated.at("modules_to_convert");
  stated.require(format.is_null() || format == "e4m3", "fmt", "e4m3");
  stated.require(experts.is_null() || experts == "fp8", "expert_dtype", "fp8");
  stated.require(further.is_null() || further.empty(), "modules_to_convert",
                 "none: look-ups are read in the model's dtype");
  constexpr const char* kBlocks = "weight_block_size";
  StoredQuantised out;
  if (!stated.has(kBlocks))
    out.form = {.kind = quantised::Kind::fp8, .block_rows = 128, .block_columns = 128};  // as transformers
  else
    out.form = stated.at(kBlocks).is_null() ? kRowByRow : stated.blocks(kBlocks);
  for (const char* const member : {"modules_to_not_convert", "ignored_layers"})
    for (std::string& name : stated.names(member)) out.left_out.push_back(std::move(name));
  return out;
}

StoredQuantised of_compressed_tensors(const Stated& stated, const std::string& where) {
  const Json& groups = stated.at("config_groups");
  if (!groups.is_object() || groups.empty()) stated.fail("config_groups", "an object of groups");
  stated.require(groups.size() == 1, "config_groups", "one group, of all linear layers");
  const Stated group(groups.front(), where);
  group.require(group.at("targets") == Json::array({"Linear"}), "targets", "[\"Linear\"]");
  const Stated weights(group.at("weights"), where);
  weights.require(weights.at("num_bits") == 8, "num_bits", "8");
  weights.require(weights.at("type") == "float", "type", "float");
  const Json& strategy = weights.at("strategy");
  StoredQuantised out;
  if (strategy == "tensor" || strategy == "channel")
    out.form = kRowByRow;
  else if (strategy == "block")
    out.form = weights.blocks("block_structure");
  else
    weights.refuse("strategy", "tensor, channel or block", strategy.dump());
  out.left_out = stated.names("ignore");
  return out;
}

}  // namespace

std::optional<StoredQuantised> read_fp8(const Json& quantization, const std::string& where) {
  const Stated stated(quantization, where);
  if (stated.at("quant_method") == "fp8") return of_method_fp8(stated);
  if (stated.at("quant_method") == "compressed-tensors") return of_compressed_tensors(stated, where);
  return std::nullopt;
}

std::optional<StoredQuantised> stored_fp8(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  const Json config = Json::parse(std::string(std::istreambuf_iterator<char>(in), {}), nullptr, false);
  if (!config.is_object() || !config.contains("quantization_config")) return std::nullopt;
  return read_fp8(config.at("quantization_config"), path.string());
}

}  // namespace espalier
