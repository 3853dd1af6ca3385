#include "espalier/checkpoint/adapter.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <unordered_set>

#include "espalier/base/error.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/tensor_names.h"
#include "espalier/shape/additions.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfig = "adapter_config.json";
constexpr std::string_view kLowA = ".lora_A.weight", kLowB = ".lora_B.weight", kWeight = ".weight",
                           kBase = ".base_layer.weight";
constexpr const char* kOther = "merge the adapter with peft (merge_and_unload)";
constexpr const char* kBelongs = "Does the adapter belong to this model?";

fs::path file_in(const fs::path& directory, const char* name) {
  const fs::path file = directory / name;
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored))
    throw InputError({file.string(), "a file of a peft adapter", "no such file",
                      "name the directory that save_pretrained of a PeftModel wrote"});
  return file;
}

// Members with which the formula stays as it is, or that are read here. Any other member must be off: a version of
// peft to come may compute something else with it.
bool is_known(const std::string& member) {
  static const std::unordered_set<std::string> known = {"task_type",
                                                        "peft_type",
                                                        "auto_mapping",
                                                        "peft_version",
                                                        "base_model_name_or_path",
                                                        "revision",
                                                        "inference_mode",
                                                        "r",
                                                        "target_modules",
                                                        "exclude_modules",
                                                        "lora_alpha",
                                                        "lora_dropout",
                                                        "bias",
                                                        "use_rslora",
                                                        "modules_to_save",
                                                        "init_lora_weights",
                                                        "megatron_core",
                                                        "target_parameters",
                                                        "rank_pattern",
                                                        "alpha_pattern",
                                                        "layers_to_transform",
                                                        "layers_pattern",
                                                        "ensure_weight_tying",
                                                        "loftq_config",
                                                        "eva_config",
                                                        "qalora_group_size"};
  return known.contains(member);
}

void check_rank(double rank, const std::string& where) {
  if (rank != std::floor(rank) || rank < 1 || rank > 1e6)
    throw InputError({where, "a whole number from 1 to 1000000", text_of(rank), ""});
}

bool is_off(const Json& value) {
  return value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
}

// Start values that leave the base model as it is; others (PiSSA, OLoRA, CorDA, LoftQ) change it when peft loads them.
bool leaves_base(const Json& start) {
  return start.is_null() || start.is_boolean() || start == "gaussian" || start == "eva" || start == "orthogonal";
}

// "q_proj" of model.layers.0.self_attn.q_proj, as peft matches a target.
bool is_target(const std::string& module, const std::string& target) {
  return module == target || module.ends_with("." + target);
}

std::string name_in(const SafetensorsEntry& entry) {
  return entry.name.starts_with(kAdapterPrefix) ? entry.name.substr(std::string_view(kAdapterPrefix).size())
                                                : entry.name;
}

}  // namespace

bool is_adapter(const fs::path& directory) {
  std::error_code ignored;
  return fs::is_regular_file(directory / kConfig, ignored);
}

std::string base_named_in(const fs::path& directory) {
  const Json config = read_json_object(file_in(directory, kConfig));
  const Json base = config.value("base_model_name_or_path", Json());
  return base.is_string() ? base.get<std::string>() : "";
}

namespace {
bool has_task(const fs::path& directory, const char* task) {
  return is_adapter(directory) && read_json_object(directory / kConfig).value("task_type", Json()) == task;
}
}  // namespace

bool is_reward_adapter(const fs::path& directory) { return has_task(directory, "SEQ_CLS"); }
bool is_critic_adapter(const fs::path& directory) { return has_task(directory, "TOKEN_CLS"); }

std::unique_ptr<const AddedValues> open_added_values(const fs::path& directory, const ModelShape& base) {
  return std::make_unique<const Adapter>(directory, base);
}

Adapter::Adapter(const fs::path& directory, const ModelShape& base)
    : file_(file_in(directory, "adapter_model.safetensors")) {
  const fs::path file = file_in(directory, kConfig);
  const Json config = read_json_object(file);
  read_config(config, file.string());
  const ParameterTable table(base);
  joint_ = joint_of(base, table);
  for (const SafetensorsEntry& entry : file_.entries()) place(entry, table);
  for (auto& [parameter, change] : changes_) check(parameter, change, table);
  if (base.tied_head && !base.value_head) check_tied_head();
  place_joint(table);
  if (changes_.empty() && pieces_.empty())
    throw InputError({file_.path().string(), "the tensors of an adapter", "none", ""});
  check_targets(config, file.string(), table);
  for (const std::string& module : modules())
    if (const Size size = size_of(module); size.rank > largest_.rank) largest_ = size;
  if (largest_.rank == 0) largest_ = common_;  // modules_to_save alone
}

void Adapter::read_config(const Json& config, const std::string& where) {
  const auto number = [&](const char* member) {
    const Json value = config.value(member, Json());
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      throw InputError({where + ": " + member, "a number", value.is_null() ? "none" : value.dump(), ""});
    return value.get<double>();
  };
  const auto refuse = [&](const std::string& member, const std::string& expected, const Json& value) {
    throw UnsupportedError({where + ": " + printable(member), expected, printable(value.dump()), kOther});
  };
  if (const Json type = config.value("peft_type", Json()); type != "LORA") refuse("peft_type", "LORA", type);
  for (const auto& [member, value] : config.items())
    if (!is_known(member) && !is_off(value)) refuse(member, "an adapter without it", value);
  if (const Json bias = config.value("bias", Json("none")); bias != "none") refuse("bias", "none", bias);
  if (const Json start = config.value("init_lora_weights", Json()); !leaves_base(start))
    refuse("init_lora_weights", "start values that leave the base model as it is", start);
  const double rank = number("r"), alpha = number("lora_alpha");
  check_rank(rank, where + ": r");
  common_ = {static_cast<std::int64_t>(rank), alpha};
  ranks_ = patterns(config, "rank_pattern", where), alphas_ = patterns(config, "alpha_pattern", where);
  for (const Pattern& pattern : ranks_) check_rank(pattern.value, where + ": rank_pattern");
  for (const Json& target : config.value("target_parameters", Json()))
    if (target.is_string()) target_parameters_.push_back(target.get<std::string>());
  if (const Json dropout = config.value("lora_dropout", Json(0)); dropout.is_number()) dropout_ = dropout.get<double>();
  root_of_rank_ = config.value("use_rslora", Json(false)) == true;
  for (const Json& module : config.value("modules_to_save", Json()))
    if (module.is_string()) to_save_.push_back(module.get<std::string>());
}

std::vector<Adapter::Pattern> Adapter::patterns(const Json& config, const char* member, const std::string& where) {
  std::vector<Pattern> out;
  const Json object = config.value(member, Json());
  if (!is_off(object) && !object.is_object())
    throw InputError({where + ": " + member, "an object of expressions and numbers", printable(object.dump()), ""});
  if (!object.is_object()) return out;
  for (const auto& [expression, value] : object.items()) {
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      throw InputError(
          {where + ": " + member + ": '" + printable(expression) + "'", "a number", printable(value.dump()), ""});
    try {
      out.push_back({Expression("(.*\\.)?(" + expression + ")"), value.get<double>()});
    } catch (const std::invalid_argument& error) {
      throw UnsupportedError({where + ": " + member, "expressions of ECMAScript",
                              "'" + printable(expression) + "': " + error.what(),
                              "write names of modules there, with a backslash before each dot"});
    }
  }
  return out;
}

// peft matches a parameter of target_parameters by its own name; that of a linear layer ends with ".weight".
Adapter::Size Adapter::size_of(const std::string& module) const {
  const std::string name = is_targeted(module + std::string(kWeight)) ? module + std::string(kWeight) : module;
  Size out = common_;
  const auto find = [&](const std::vector<Pattern>& patterns, auto& value) {
    const auto found =
        std::ranges::find_if(patterns, [&](const Pattern& pattern) { return pattern.expression.matches(name); });
    if (found != patterns.end()) value = static_cast<std::remove_reference_t<decltype(value)>>(found->value);
  };
  find(ranks_, out.rank), find(alphas_, out.alpha);
  return out;
}

double Adapter::scale_of(const Size& size) const {
  const auto rank = static_cast<double>(size.rank);
  return size.alpha / (root_of_rank_ ? std::sqrt(rank) : rank);
}

bool Adapter::is_targeted(const std::string& parameter) const {
  return std::ranges::any_of(target_parameters_,
                             [&](const std::string& target) { return is_target(parameter, target); });
}

Adapter::Size Adapter::common_size() const {
  const double factor = scale_of(largest_);
  for (const std::string& module : modules())
    if (const double own = scale_of(size_of(module)); std::abs(own - factor) > 1e-15 * std::abs(factor))
      throw UnsupportedError({file_.path().parent_path().string() + ": rank_pattern, alpha_pattern",
                              text_of("one factor s for all modules, here ", factor),
                              text_of(own, " of '", printable(module), "'"),
                              "merge the adapter into the model (espalier merge)"});
  return largest_;
}

void Adapter::place(const SafetensorsEntry& entry, const ParameterTable& base) {
  const std::string where = file_.path().string() + ": tensor '" + printable(entry.name) + "'";
  if (!is_floating(entry.type))
    throw UnsupportedError({where, "F64, F32, F16 or BF16", name_of(entry.type), "save the adapter unquantised"});
  std::string name = name_in(entry);
  if (const auto joint = joint_.tensors.find(name); joint != joint_.tensors.end()) {
    if (joint->second != nullptr)
      throw InputError({where, "every tensor once", "'" + printable(joint->second->name) + "', too", ""});
    joint->second = &entry;
    return;
  }
  const bool a = name.ends_with(kLowA), b = name.ends_with(kLowB);
  const bool is_base = name.ends_with(kBase);
  if (a || b) name.replace(name.size() - kLowA.size(), kLowA.size(), kWeight);
  if (is_base) name.replace(name.size() - kBase.size(), kBase.size(), kWeight);
  if (name.find("lora_") != name.npos)
    throw UnsupportedError({where, "lora_A and lora_B of linear layers", "another part of an adapter", kOther});
  if (joint_.tied_head && name == kHeadName && !a && !b) {
    if (!is_base) return;   // check_tied_head
    name = kEmbeddingName;  // they are the same
  }
  if (!base.contains(name) && !a && !b && !is_base) return place_whole(entry, name, base);
  if (!base.contains(name))
    throw InputError(
        {where, "tensors of the base model", "'" + printable(name) + "', which the base model lacks", kBelongs});
  Change& change = changes_[name];
  if (!a && !b && change.whole.entry != nullptr && (is_base || change.is_base)) return;  // of a tied head, twice
  const SafetensorsEntry*& place = a ? change.a.entry : b ? change.b.entry : change.whole.entry;
  if (place != nullptr) throw InputError({where, "every tensor once", "'" + printable(place->name) + "', too", ""});
  place = &entry;
  if (is_base) change.is_base = true;
}

// A tensor of modules_to_save that is several parameters here, or one of another name.
void Adapter::place_whole(const SafetensorsEntry& entry, const std::string& tensor, const ParameterTable& base) {
  bool any = false;
  for (const Parameter& p : base.parameters()) {
    if (p.file.tensor != tensor) continue;
    any = true;
    Piece& whole = changes_[p.name].whole;
    if (whole.entry != nullptr)
      throw InputError({file_.path().string() + ": tensor '" + printable(entry.name) + "'", "every tensor once",
                        "'" + printable(whole.entry->name) + "', too", ""});
    whole = {&entry, p.file.is_part() ? p.file : FilePlace()};
  }
  if (!any)
    throw InputError({file_.path().string() + ": tensor '" + printable(entry.name) + "'", "tensors of the base model",
                      "'" + printable(tensor) + "', which the base model lacks", kBelongs});
}

// If a model's head is its embedding, peft's ensure_weight_tying saves both alike; without it peft changes one
// alone.
void Adapter::check_tied_head() const {
  const auto saved = [&](const char* name) {
    const SafetensorsEntry* const found = file_.find(std::string(kAdapterPrefix) + name);
    return found != nullptr ? found : file_.find(name);
  };
  const SafetensorsEntry *const head = saved(kHeadName), *const embedding = saved(kEmbeddingName);
  const SafetensorsEntry* const one = head != nullptr ? head : embedding;
  if (one == nullptr) return;
  const bool alike = head != nullptr && embedding != nullptr && embedding->type == head->type &&
                     embedding->bytes == head->bytes &&
                     std::memcmp(embedding->data, head->data, static_cast<std::size_t>(head->bytes)) == 0;
  if (!alike)
    throw UnsupportedError(
        {file_.path().string() + ": tensor '" + printable(one->name) + "'",
         "embedding and head alike, because they are one matrix in the model (tie_word_embeddings)",
         text_of(head != nullptr ? "a head" : "an embedding", " of its own (modules_to_save)"),
         "Save the base model with tie_word_embeddings false, or save both with peft's ensure_weight_tying"});
}

void Adapter::check(const std::string& parameter, Change& change, const ParameterTable& base) const {
  const std::string where = file_.path().string() + ": '" + parameter + "'";
  const std::vector<std::int64_t>& shape = base.at(parameter).shape;
  const auto expect = [&](const SafetensorsEntry& entry, const std::vector<std::int64_t>& expected) {
    if (entry.shape != expected)
      throw InputError({file_.path().string() + ": tensor '" + printable(entry.name) + "'",
                        "shape " + shape_text(expected), shape_text(entry.shape), kBelongs});
  };
  if (change.whole.entry != nullptr) {
    const bool has_pair = change.a.entry != nullptr || change.b.entry != nullptr;
    if (has_pair && !change.is_base) throw InputError({where, "lora_A and lora_B, or the whole tensor", "both", ""});
    expect(*change.whole.entry, change.whole.place.is_part() ? change.whole.place.shape : shape);
    if (!has_pair) return;
  }
  if (change.a.entry == nullptr || change.b.entry == nullptr)
    throw InputError({where, "lora_A and lora_B", change.a.entry == nullptr ? "lora_B alone" : "lora_A alone",
                      "The adapter is damaged; save it again"});
  if (shape.size() != 2 || parameter.find("embed_tokens") != parameter.npos)
    throw UnsupportedError({where, "a linear layer", "shape " + shape_text(shape), kOther});
  const Size size = size_of(parameter.substr(0, parameter.size() - kWeight.size()));
  expect(*change.a.entry, {size.rank, shape[1]});
  expect(*change.b.entry, {shape[0], size.rank});
  change.scale = scale_of(size);
}

// The model with an adapter of every module that can have one; of experts, only of the modules in target_parameters.
ModelShape Adapter::joint_shape(const ModelShape& base, std::int64_t rank) const {
  ModelShape all = with_every_addition(base, rank);
  std::vector<AdaptedLayer> of_layer;
  for (std::int64_t layer = 0; layer < all.layers(); ++layer) {
    AdaptedLayer& adapted = of_layer.emplace_back(all.at(layer).adapted);
    if (!all.has_experts(layer)) continue;
    const std::string experts = layer_prefix(layer) + module_name(base.names.experts);
    const PartParameters mlp = layer_parameters(all, all.at(layer)).mlp;
    for (const auto& [product, name] :
         {std::pair{ExpertProductNumbers::gate_up, ".gate_up_proj"}, {ExpertProductNumbers::down, ".down_proj"}})
      for (std::size_t part = 0; part < mlp.products()[product].parts.size() && !is_targeted(experts + name); ++part)
        adapted.mlp &= ~(std::uint32_t{1} << mlp.number(product, part));
  }
  set_adapted(all, of_layer);
  return all;
}

// The adapted experts are the config's target_parameters. Their order in the file follows from which of them there are.
Adapter::Joint Adapter::joint_of(const ModelShape& base, const ParameterTable& table) const {
  Joint out;
  out.tied_head = base.tied_head;
  const ModelShape all = joint_shape(base, common_.rank);
  out.places = adapter_places(all);
  std::map<std::int64_t, std::map<std::string, FilePlace>> of_rank;  // others than the common one
  for (const AddedPair& part : added_pairs(all)) {
    if (const std::int64_t rank = size_of(part.module).rank; rank != common_.rank) {
      if (!of_rank.contains(rank)) of_rank.emplace(rank, adapter_places(joint_shape(base, rank)));
      for (const std::string& name : {part.a, part.b}) out.places[name] = of_rank.at(rank).at(name);
    }
    const std::string module = part.weight.substr(0, part.weight.size() - kWeight.size());
    const std::string &a = out.places.at(part.a).tensor, &b = out.places.at(part.b).tensor;
    if (a == module + std::string(kLowA) && b == module + std::string(kLowB) && table.contains(part.weight)) continue;
    out.parts.push_back(part);
    out.tensors.emplace(a, nullptr), out.tensors.emplace(b, nullptr);
    if (part.expert >= 0) out.needed.insert({a, b});
  }
  return out;
}

void Adapter::place_joint(const ParameterTable& table) {
  const auto found = [&](const FilePlace& place) {
    const SafetensorsEntry* const entry = joint_.tensors.at(place.tensor);
    if (entry != nullptr && entry->shape != place.shape)
      throw InputError({file_.path().string() + ": tensor '" + printable(entry->name) + "'",
                        "shape " + shape_text(place.shape), shape_text(entry->shape), kBelongs});
    return Piece{entry, place};
  };
  for (const AddedPair& part : joint_.parts) {
    const Piece a = found(joint_.places.at(part.a)), b = found(joint_.places.at(part.b));
    const bool needed = joint_.needed.contains(a.place.tensor);
    if (a.entry == nullptr && b.entry == nullptr && !needed) continue;
    if (a.entry == nullptr || b.entry == nullptr)
      throw InputError({file_.path().string(), "'" + a.place.tensor + "' and '" + b.place.tensor + "'",
                        a.entry != nullptr   ? "lora_A alone"
                        : b.entry != nullptr ? "lora_B alone"
                                             : "neither",
                        needed ? "They are among target_parameters; the adapter is damaged, or belongs to another model"
                               : "The adapter is damaged; save it again"});
    pieces_[part.a] = a, pieces_[part.b] = b;
    modules_.insert(part.module);
    if (!table.contains(part.weight)) continue;
    Change& change = changes_[part.weight];
    if (change.whole.entry != nullptr)
      throw InputError(
          {file_.path().string() + ": '" + part.weight + "'", "lora_A and lora_B, or the whole tensor", "both", ""});
    change.a = a, change.b = b, change.scale = scale_of(size_of(part.module));
  }
}

// Experts are left out: transformers 5 holds them as one parameter, which names in target_modules do not reach. So is
// what layers_to_transform, exclude_modules or an expression may leave out.
void Adapter::check_targets(const Json& config, const std::string& where, const ParameterTable& base) const {
  for (const char* member : {"layers_to_transform", "exclude_modules"})
    if (config.contains(member) && !is_off(config[member])) return;
  const Json targets = config.value("target_modules", Json());
  if (!targets.is_array()) return;
  for (const Parameter& parameter : base.parameters()) {
    if (parameter.shape.size() != 2 || !parameter.name.ends_with(kWeight) || changes(parameter.name)) continue;
    if (parameter.name.find(".experts.") != parameter.name.npos) continue;
    const std::string module = parameter.name.substr(0, parameter.name.size() - kWeight.size());
    for (const Json& target : targets)
      if (target.is_string() && is_target(module, target.get<std::string>()))
        throw InputError({file_.path().string(), "lora_A and lora_B of '" + module + "', a target of " + where,
                          "neither", kBelongs});
  }
  for (const AddedPair& part : joint_.parts)
    for (const Json& target : targets)
      if (part.expert < 0 && !modules_.contains(part.module) && target.is_string() &&
          is_target(part.module, target.get<std::string>()))
        throw InputError({file_.path().string(), "lora_A and lora_B of '" + part.module + "', a target of " + where,
                          "neither", kBelongs});
}

std::set<std::string> Adapter::modules() const {
  std::set<std::string> out = modules_;
  for (const auto& [parameter, change] : changes_)
    if (change.a.entry != nullptr && change.a.place.tensor.empty())
      out.insert(parameter.substr(0, parameter.size() - kWeight.size()));
  return out;
}

std::vector<std::string> Adapter::whole() const {
  std::vector<std::string> out;
  for (const auto& [parameter, change] : changes_)
    if (change.whole.entry != nullptr && change.a.entry == nullptr &&
        std::ranges::any_of(to_save_, [of = saved_module(name_in(*change.whole.entry))](const std::string& module) {
          return is_target(of, module);
        }))
      out.push_back(parameter);
  return out;
}

// In chunks: a whole embedding may be among them.
void Adapter::expect_finite(const Piece& piece) const {
  const auto expect = [&](std::span<const double> values) {
    if (!std::ranges::all_of(values, [](double x) { return std::isfinite(x); }))
      throw InputError({file_.path().string() + ": tensor '" + printable(piece.entry->name) + "'", "finite numbers",
                        "infinite ones or NaN", "the training that wrote the adapter failed; take an earlier one"});
  };
  std::vector<double> some(std::size_t{1} << 14);
  if (!piece.place.tensor.empty()) {
    const std::vector<std::byte> bytes = piece.values(DType::float64);
    some.resize(bytes.size() / sizeof(double));
    std::memcpy(some.data(), bytes.data(), bytes.size());
    return expect(some);
  }
  const std::int64_t element = bytes_of(piece.entry->type);
  for (std::int64_t first = 0; first < piece.entry->count; first += static_cast<std::int64_t>(some.size())) {
    const std::int64_t count = std::min(piece.entry->count - first, static_cast<std::int64_t>(some.size()));
    convert_values(piece.entry->type, piece.entry->data + first * element, DType::float64, some.data(), count);
    expect({some.data(), static_cast<std::size_t>(count)});
  }
}

std::vector<double> Adapter::doubles_of(const Piece& piece) const {
  expect_finite(piece);
  const std::vector<std::byte> bytes = piece.values(DType::float64);
  std::vector<double> out(bytes.size() / sizeof(double));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

std::vector<std::byte> Adapter::Piece::values(DType dtype) const {
  const std::int64_t element = bytes_of(entry->type), bytes = bytes_of(dtype);
  std::vector<std::byte> out(
      static_cast<std::size_t>((place.tensor.empty() ? entry->count : place.rows * place.columns) * bytes));
  if (place.tensor.empty()) {
    convert_values(entry->type, entry->data, dtype, out.data(), entry->count);
    return out;
  }
  const std::int64_t run = place.column_step == 1 ? place.columns : 1;  // neighbours in both
  std::byte* next = out.data();
  for (std::int64_t i = 0; i < place.rows; ++i)
    for (std::int64_t j = 0; j < place.columns; j += run, next += run * bytes)
      convert_values(entry->type, entry->data + place.at(i, j) * element, dtype, next, run);
  return out;
}

bool Adapter::has(const std::string& parameter) const { return piece_of(parameter).entry != nullptr; }

std::vector<std::byte> Adapter::values(const std::string& parameter, DType dtype) const {
  const Piece piece = piece_of(parameter);
  expect_finite(piece);
  std::vector<std::byte> own = piece.values(dtype);
  const bool a = parameter.ends_with(kLowA), b = parameter.ends_with(kLowB);
  if (!a && !b) return own;
  const auto [rows, columns] = sides_of(piece);
  const std::int64_t bytes = bytes_of(dtype);
  if (a) own.resize(static_cast<std::size_t>(largest_.rank * columns * bytes));  // zeros of every dtype
  if (a || columns == largest_.rank) return own;
  std::vector<std::byte> filled(static_cast<std::size_t>(rows * largest_.rank * bytes));
  for (std::int64_t row = 0; row < rows; ++row)
    std::copy_n(own.begin() + row * columns * bytes, columns * bytes, filled.begin() + row * largest_.rank * bytes);
  return filled;
}

std::pair<std::int64_t, std::int64_t> Adapter::sides_of(const Piece& piece) {
  if (!piece.place.tensor.empty()) return {piece.place.rows, piece.place.columns};
  return {piece.entry->shape[0], piece.entry->shape[1]};
}

Adapter::Piece Adapter::piece_of(const std::string& parameter) const {
  if (const auto piece = pieces_.find(parameter); piece != pieces_.end()) return piece->second;
  const bool a = parameter.ends_with(kLowA), b = parameter.ends_with(kLowB);
  std::string of = parameter;
  if (a || b) of.replace(of.size() - kLowA.size(), kLowA.size(), kWeight);
  const auto found = changes_.find(of);
  if (found == changes_.end()) return {};
  return a ? found->second.a : b ? found->second.b : found->second.whole;
}

bool Adapter::changes_tied_head() const { return joint_.tied_head && modules_.contains("lm_head"); }

void Adapter::apply(const std::string& parameter, std::vector<double>& values) const {
  const Change& change = changes_.at(parameter);
  if (change.whole.entry != nullptr) values = doubles_of(change.whole);
  if (change.a.entry == nullptr) return;
  const std::vector<double> a = doubles_of(change.a), b = doubles_of(change.b);
  const auto rank =
      static_cast<std::size_t>(change.a.place.tensor.empty() ? change.a.entry->shape[0] : change.a.place.rows);
  const std::size_t outputs = b.size() / rank, inputs = a.size() / rank;
  ESPALIER_INTERNAL_EQ(values.size(), outputs * inputs);
#pragma omp parallel for schedule(static)
  for (std::size_t out = 0; out < outputs; ++out)
    for (std::size_t r = 0; r < rank; ++r) {
      const double factor = change.scale * b[out * rank + r];
      for (std::size_t in = 0; in < inputs; ++in) values[out * inputs + in] += factor * a[r * inputs + in];
    }
}

}  // namespace espalier
