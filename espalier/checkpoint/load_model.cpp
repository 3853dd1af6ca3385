// Finding, checking and converting the tensors of a model. Nothing is converted before every name and shape is right.
#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <unordered_set>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/nf4.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/fp8_tensors.h"
#include "espalier/checkpoint/half_block_names.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/nf4_tensors.h"
#include "espalier/checkpoint/packed_experts.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/checkpoint/strided_copy.h"
#include "espalier/checkpoint/tensor_names.h"
#include "espalier/config/fp8_config.h"
#include "espalier/config/unread_tensors.h"
#include "espalier/model/parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

// The two ways to store a text model beside a tower.
constexpr std::string_view kTextOfVision = "model.language_model.", kTextOfLanguage = "language_model.model.";
constexpr const char* kHeadOfLanguage = "language_model.lm_head.weight";

// All tensors of a model, whatever file they are in.
struct Tensors {
  fs::path where;  // named in messages
  std::list<SafetensorsFile> files;
  std::map<std::string, const SafetensorsEntry*> by_name;
  std::list<SafetensorsEntry> parts;            // of fused tensors, under the names they have on their own
  std::vector<const SafetensorsEntry*> beside;  // of a model with a vision tower, and of layers that do not run
  std::int64_t further = 0;                     // the number of them in layers that predict further tokens
  std::map<std::string, std::string> absent;    // that the index names: name -> file
};

void open_file(const fs::path& path, Tensors& tensors) {
  tensors.files.emplace_back(path);
  for (const SafetensorsEntry& entry : tensors.files.back().entries()) {
    if (!tensors.by_name.emplace(entry.name, &entry).second)
      throw InputError({path.string(), "every tensor in one file", "'" + printable(entry.name) + "' in two", ""});
  }
}

// { "weight_map": { tensor name: file name in the same directory } }
void open_shards(const fs::path& index_path, Tensors& tensors) {
  const Json index = read_json_object(index_path);
  const std::string where = index_path.string();
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty())
    throw InputError({where, "weight_map with the file of every tensor", "none", "Fetch the model again"});

  std::map<std::string, std::string> file_of;
  std::unordered_set<std::string> opened;
  for (const auto& [name, value] : map->items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos ||
        file.find('\0') != std::string::npos)
      throw InputError({where + ": tensor '" + printable(name) + "'", "the name of a file in the same directory",
                        "'" + printable(value.is_string() ? file : value.type_name()) + "'", ""});
    file_of.emplace(name, file);
    if (!opened.insert(file).second) continue;
    const fs::path path = index_path.parent_path() / file;
    if (!fs::exists(path))
      throw InputError({where, "the weight file '" + printable(file) + "'", "no such file", "Fetch the model again"});
    open_file(path, tensors);
  }
  for (const SafetensorsFile& file : tensors.files)
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto listed = file_of.find(entry.name);
      if (listed == file_of.end() || listed->second != file.path().filename())
        throw InputError({file.path().string(), "only tensors that the index names for this file",
                          "'" + printable(entry.name) + "'", "Fetch the model again"});
    }
  for (const auto& [name, file] : file_of)
    if (tensors.by_name.count(name) == 0) tensors.absent.emplace(name, file);
}

// The slice [index] of the first dimension, or half of it where there are two.
SafetensorsEntry part_of(const SafetensorsEntry& whole, std::string name, std::int64_t index, std::int64_t half,
                         std::int64_t halves) {
  SafetensorsEntry part = whole;
  part.name = std::move(name);
  part.shape = {whole.shape[1] / halves, whole.shape[2]};
  part.count = part.shape[0] * part.shape[1];
  part.bytes = part.count * bytes_of(whole.type);
  part.data = whole.data + (index * halves + half) * part.bytes;
  return part;
}

// Recent transformers may store the experts of a layer as two tensors, experts.gate_up_proj [E, 2F, M] (gate, then up;
// without gates experts.up_proj [E, F, M]) and experts.down_proj [E, M, F], as Granite 4's files do under other names:
// they are read as their slices.
void split_fused_experts(Tensors& tensors) {
  constexpr std::string_view kInput = ".block_sparse_moe.input_linear.weight",
                             kOutput = ".block_sparse_moe.output_linear.weight", kUp = ".experts.up_proj";
  std::vector<const SafetensorsEntry*> fused;
  for (const auto& [name, entry] : tensors.by_name)
    if ((name.ends_with(".experts.gate_up_proj") || name.ends_with(kUp) || name.ends_with(".experts.down_proj") ||
         name.ends_with(kInput) || name.ends_with(kOutput)) &&
        entry->shape.size() == 3)
      fused.push_back(entry);
  for (const SafetensorsEntry* entry : fused) {
    const bool granite = entry->name.ends_with(kInput) || entry->name.ends_with(kOutput);
    const std::string module = granite ? entry->name.substr(0, entry->name.rfind(".weight")) : entry->name;
    const std::string experts = module.substr(0, module.rfind('.') + 1) + (granite ? "experts." : "");
    const bool down = module.ends_with(".down_proj") || entry->name.ends_with(kOutput), up = module.ends_with(kUp);
    if (!down && !up && entry->shape[1] % 2 != 0) continue;  // reported as unexpected
    tensors.by_name.erase(entry->name);
    for (std::int64_t e = 0; e < entry->shape[0]; ++e) {
      const std::string expert = experts + std::to_string(e) + ".";
      const auto add = [&](const std::string& name, std::int64_t half, std::int64_t halves) {
        tensors.parts.push_back(part_of(*entry, expert + name + ".weight", e, half, halves));
        if (!tensors.by_name.emplace(tensors.parts.back().name, &tensors.parts.back()).second)
          throw InputError({tensors.where.string(), "every expert once",
                            "'" + printable(tensors.parts.back().name) + "' fused and on its own", ""});
      };
      if (down || up) {
        add(down ? "down_proj" : "up_proj", 0, 1);
      } else {
        add("gate_proj", 0, 2);
        add("up_proj", 1, 2);
      }
    }
  }
}

// Rows [first, first + rows) of a matrix.
SafetensorsEntry rows_of(const SafetensorsEntry& whole, std::string name, std::int64_t first, std::int64_t rows) {
  SafetensorsEntry part = whole;
  part.name = std::move(name);
  part.shape[0] = rows;
  part.count = rows * whole.shape[1];
  part.bytes = part.count * bytes_of(whole.type);
  const std::int64_t begin = first * whole.shape[1] * bytes_of(whole.type);
  if (whole.unpack) {
    part.quantised = whole.quantised ? whole.quantised->part(first, rows) : nullptr;
    part.unpack = [of_whole = whole.unpack, whole_bytes = whole.bytes, begin, bytes = part.bytes](std::byte* out) {
      std::vector<std::byte> all(static_cast<std::size_t>(whole_bytes));
      of_whole(all.data());
      std::memcpy(out, all.data() + begin, static_cast<std::size_t>(bytes));
    };
  } else {
    part.data = whole.data + begin;
  }
  return part;
}

// Matrices that some families store as one (Phi-3, GLM-4): self_attn.qkv_proj, whose queries are as wide as what o_proj
// reads, in Sarvam attention.query_key_value and dense; and mlp.gate_up_proj, in Granite 4 shared_mlp.input_linear.
// A matrix that does not fit stays, and is reported as unexpected.
void split_fused_matrices(Tensors& tensors) {
  constexpr std::string_view kQkv = ".self_attn.qkv_proj.weight", kNamedQkv = ".attention.query_key_value.weight",
                             kGateUp = ".mlp.gate_up_proj.weight", kInput = ".shared_mlp.input_linear.weight";
  std::vector<const SafetensorsEntry*> fused;
  for (const auto& [name, entry] : tensors.by_name)
    if ((name.ends_with(kQkv) || name.ends_with(kNamedQkv) || name.ends_with(kGateUp) || name.ends_with(kInput)) &&
        entry->shape.size() == 2)
      fused.push_back(entry);
  for (const SafetensorsEntry* entry : fused) {
    const bool named = entry->name.ends_with(kNamedQkv), qkv = named || entry->name.ends_with(kQkv);
    const std::string path = entry->name.substr(0, entry->name.rfind(".weight"));
    std::string module = path.substr(0, path.rfind('.') + 1);
    const std::int64_t rows = entry->shape[0];
    std::vector<std::pair<std::string, std::int64_t>> parts{{"gate_proj", rows / 2}, {"up_proj", rows / 2}};
    if (qkv) {
      const auto output = tensors.by_name.find(module + (named ? "dense.weight" : "o_proj.weight"));
      if (output == tensors.by_name.end() || output->second->shape.size() != 2) continue;
      const std::int64_t queries = output->second->shape[1], others = (rows - queries) / 2;
      if (queries >= rows) continue;
      parts = {{"q_proj", queries}, {"k_proj", others}, {"v_proj", others}};
    }
    std::int64_t first = 0;
    for (const auto& [name, size] : parts) first += size;
    if (first != rows) continue;
    tensors.by_name.erase(entry->name);
    if (named) module.replace(module.rfind("attention."), std::string::npos, "self_attn.");
    first = 0;
    for (const auto& [name, size] : parts) {
      tensors.parts.push_back(rows_of(*entry, module + name + ".weight", first, size));
      if (!tensors.by_name.emplace(tensors.parts.back().name, &tensors.parts.back()).second)
        throw InputError({tensors.where.string(), "every matrix once",
                          "'" + printable(tensors.parts.back().name) + "' fused and on its own", ""});
      first += size;
    }
  }
}

// Nemotron-H's tensors get the names that they have here.
void join_half_blocks(Tensors& tensors) {
  const bool halves = std::ranges::any_of(
      tensors.by_name, [](const auto& item) { return item.first.find(".mixer.") != item.first.npos; });
  if (!halves) return;
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors.by_name) names.push_back(name);
  std::map<std::string, const SafetensorsEntry*> renamed;
  const std::map<std::string, std::string> own = names_of_blocks(names);
  for (const auto& [name, entry] : tensors.by_name) {
    const auto found = own.find(name);
    renamed.emplace(found == own.end() ? name : found->second, entry);
  }
  tensors.by_name = std::move(renamed);
}

// The dense layers of a Kimi Linear that transformers saved: it writes them, too, below the module of experts.
void rename_dense_layers(Tensors& tensors) {
  constexpr std::string_view kOfExperts = ".block_sparse_moe.", kDense = ".mlp.";
  std::map<std::string, const SafetensorsEntry*> renamed;
  for (const auto& [name, entry] : tensors.by_name) {
    const std::size_t at = name.find(kOfExperts);
    std::string_view rest = name;
    rest.remove_prefix(at == name.npos ? name.size() : at + kOfExperts.size());
    const bool dense = rest == "gate_proj.weight" || rest == "up_proj.weight" || rest == "down_proj.weight";
    renamed.emplace(dense ? text_of(name.substr(0, at), kDense, rest) : name, entry);
  }
  tensors.by_name = std::move(renamed);
}

// Sarvam's embedding.
void rename_embedding(Tensors& tensors) {
  const auto named = tensors.by_name.find("model.word_embeddings.weight");
  if (named == tensors.by_name.end()) return;
  tensors.by_name.emplace(kEmbeddingName, named->second);
  tensors.by_name.erase("model.word_embeddings.weight");
}

// Towers and projectors of images, and of sounds.
bool is_of_vision(std::string_view name) {
  if (name.starts_with(kDecoderPrefix)) name.remove_prefix(std::string_view(kDecoderPrefix).size());
  for (const std::string_view prefix : {"visual.", "vision_tower.", "multi_modal_projector.", "vision_embedder.",
                                        "embed_vision.", "audio_tower.", "embed_audio."})
    if (name.starts_with(prefix)) return true;
  return false;
}

// Numbers that a layer's shape has (config/stored_scales.h).
bool is_of_shape(std::string_view name) { return name.ends_with(".layer_scalar"); }

// Layers that predict further tokens, which transformers leaves out as well. Some families store such a layer behind
// the others (GLM-4.5, DeepSeek-V3): it alone has a matrix eh_proj. `prefixes`: of those layers.
bool is_further(std::string_view name, const std::vector<std::string>& prefixes) {
  return name.starts_with("mtp.") ||
         std::ranges::any_of(prefixes, [&](const std::string& prefix) { return name.starts_with(prefix); });
}

// Leaves the text model's tensors alone under the names that it has on its own. Others are copied into models that are
// written, where no tensor is in FP8.
void set_apart_the_rest(Tensors& tensors) {
  constexpr std::string_view kFurtherTokens = "eh_proj.weight";
  std::map<std::string, const SafetensorsEntry*> of_text;
  std::vector<std::string> further;
  for (const auto& [name, entry] : tensors.by_name)
    if (name.ends_with(kFurtherTokens)) further.push_back(name.substr(0, name.size() - kFurtherTokens.size()));
  const std::vector<std::string> unread = unread_modules(tensors.where);
  const auto is_unread = [&](const std::string& name) {
    return std::ranges::any_of(unread, [&](const std::string& module) {
      const std::size_t at = name.find(module);
      return at == 0 || (at != name.npos && name[at - 1] == '.');
    });
  };
  std::string_view text_prefix;  // in place of "model."
  for (const std::string_view prefix : {kTextOfVision, kTextOfLanguage})
    if (std::ranges::any_of(tensors.by_name, [&](const auto& item) { return item.first.starts_with(prefix); }))
      text_prefix = prefix;
  for (const auto& [name, entry] : tensors.by_name) {
    const bool is_further_layer = is_further(name, further);
    tensors.further += is_further_layer ? 1 : 0;
    if (is_further_layer || is_of_vision(name) || is_of_shape(name) || is_unread(name))
      tensors.beside.push_back(is_fp8(*entry) ? &tensors.parts.emplace_back(in_bfloat16(*entry)) : entry);
    else if (!text_prefix.empty() && name.starts_with(text_prefix))
      of_text.emplace(kDecoderPrefix + name.substr(text_prefix.size()), entry);
    else
      of_text.emplace(name == kHeadOfLanguage ? kHeadName : name, entry);
  }
  tensors.by_name = std::move(of_text);
}

// The tensors under the names that parameters have here.
void take_apart(Tensors& tensors) {
  join_nf4_tensors(tensors.by_name, tensors.parts, tensors.where.string());
  join_fp8_tensors(tensors.by_name, tensors.parts, stored_fp8(tensors.where), tensors.where.string());
  split_packed_experts(tensors.by_name, tensors.parts);
  split_fused_experts(tensors);
  split_fused_matrices(tensors);
  join_half_blocks(tensors);
  rename_dense_layers(tensors);
  rename_embedding(tensors);
  set_apart_the_rest(tensors);
}

// A parameter in a file's tensor.
SafetensorsEntry entry_of(const Parameter& p, const SafetensorsEntry& whole) {
  SafetensorsEntry part = whole;
  part.name = p.name;
  if (!p.file.is_part()) return part;
  const FilePlace& place = p.file;
  const std::int64_t element = bytes_of(whole.type);
  part.shape = p.whole_shape();
  part.count = place.rows * place.columns;
  part.bytes = part.count * element;
  part.data = whole.data + place.first * element;
  if (place.is_contiguous()) return part;
  part.unpack = [from = part.data, element, place](std::byte* out) {
    copy_strided(element, place.rows, place.columns, place.row_step, place.column_step, place.columns, 1, from, out);
  };
  return part;
}

// Tensors of files for users that need not hold a whole model, so that only the table's rows say what is in them.
void take_rows_apart(Tensors& tensors, const ParameterTable& table) {
  std::map<std::string, const SafetensorsEntry*> rows;
  std::set<std::string> of_files;
  for (const Parameter& p : table.parameters()) {
    if (p.file.tensor.empty() || p.added) continue;
    const auto found = tensors.by_name.find(p.file.tensor);
    if (found == tensors.by_name.end() || bytes_of(found->second->type) < 2) continue;
    if (p.file.is_part() && found->second->shape != p.file.shape) continue;  // reported as unexpected
    tensors.parts.push_back(entry_of(p, *found->second));
    rows.emplace(p.name, &tensors.parts.back());
    of_files.insert(p.file.tensor);
  }
  for (const std::string& name : of_files) tensors.by_name.erase(name);
  tensors.by_name.merge(rows);
}

Tensors open_model(const fs::path& directory) {
  Tensors tensors;
  tensors.where = directory;
  if (!fs::is_directory(directory))
    throw InputError({directory.string(), "a model directory", fs::exists(directory) ? "a file" : "nothing there", ""});
  const fs::path single = directory / "model.safetensors", index = directory / "model.safetensors.index.json";
  if (fs::exists(single)) {
    open_file(single, tensors);
  } else if (fs::exists(index)) {
    open_shards(index, tensors);
  } else if (fs::exists(directory / "pytorch_model.bin") || fs::exists(directory / "pytorch_model.bin.index.json")) {
    throw UnsupportedError({directory.string(), "weights in model.safetensors", "pickled weights in pytorch_model.bin",
                            "Load the model with transformers and save it with save_pretrained"});
  } else {
    throw InputError(
        {directory.string(), "model.safetensors or model.safetensors.index.json", "neither",
         "Is the download complete? Weights in another format: load them with transformers and call save_pretrained"});
  }
  take_apart(tensors);
  return tensors;
}

// Names as the table spells them: a bare decoder's tensors get their prefix.
std::map<std::string, const SafetensorsEntry*> table_names(const Tensors& tensors) {
  const bool prefixed = std::any_of(tensors.by_name.begin(), tensors.by_name.end(),
                                    [](const auto& item) { return item.first.starts_with(kDecoderPrefix); });
  if (prefixed) return tensors.by_name;
  std::map<std::string, const SafetensorsEntry*> out;
  for (const auto& [name, entry] : tensors.by_name) {
    const bool of_head = name == kHeadName || name == kValueWeight || name == kValueBias;
    out.emplace(of_head ? name : kDecoderPrefix + name, entry);
  }
  return out;
}

bool equal_values(const SafetensorsEntry& a, const SafetensorsEntry& b) {
  if (a.shape != b.shape || !is_floating(a.type) || !is_floating(b.type)) return false;
  std::vector<std::byte> room_of_a, room_of_b;
  const std::byte *const of_a = values_of(a, room_of_a), *const of_b = values_of(b, room_of_b);
  if (a.type == b.type && std::memcmp(of_a, of_b, static_cast<std::size_t>(a.bytes)) == 0) return true;
  std::vector<double> left(static_cast<std::size_t>(a.count)), right(left.size());
  convert_values(a.type, of_a, DType::float64, left.data(), a.count);
  convert_values(b.type, of_b, DType::float64, right.data(), b.count);
  return left == right;
}

// A tied head is the embedding under another name. read_model_shape unties a directory in which they differ; other
// readers of one (a trace's checkpoint, whose model is tied) refuse it.
void resolve_tied_head(std::map<std::string, const SafetensorsEntry*>& names, const fs::path& where) {
  const auto head = names.find(kHeadName);
  if (head == names.end()) return;
  const auto embedding = names.emplace(kEmbeddingName, head->second).first;
  if (embedding->second != head->second && !equal_values(*embedding->second, *head->second))
    throw InputError({where.string(), "lm_head.weight equal to the embedding, since the head is tied", "other values",
                      "Set tie_word_embeddings to false in config.json to train the head on its own"});
  names.erase(head);
}

std::string first_few(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 4;
  std::string out;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i)
    out += (i == 0 ? "'" : ", '") + printable(names[i]) + "'";
  if (names.size() > kShown) out += text_of(" and ", names.size() - kShown, " more");
  return out;
}

std::string remedy_for(const std::vector<std::string>& missing, const std::vector<std::string>& unexpected) {
  if (missing == std::vector<std::string>{kHeadName})
    return "If the head is the embedding, set tie_word_embeddings to true in config.json";
  if (missing == std::vector<std::string>{kValueWeight})
    return "Give a critic that was trained, or a ...ForCausalLM directory, which gets a new value head";
  for (const std::string& name : unexpected)
    if (name.ends_with("_scale") || name.ends_with("_scale_inv") || name.ends_with(".qweight"))
      return "The model looks quantised; use its original weights";
  return "Does config.json belong to these weights?";
}

bool may_be_absent(const std::string& name, ValueHead head) {
  return name == kValueBias || (name == kValueWeight && head == ValueHead::fresh);
}

// The entry of every parameter, in the table's order; null where it may be absent and is.
std::vector<const SafetensorsEntry*> match(const Tensors& tensors, const ParameterTable& table, ValueHead head) {
  auto names = table_names(tensors);
  const auto in_model = [&](const char* name) { return table.contains(name) || table.elsewhere(name); };
  if (in_model(kValueWeight)) {
    if (head == ValueHead::fresh) names.erase(kHeadName);
  } else if (!in_model(kHeadName)) {
    resolve_tied_head(names, tensors.where);
  }

  std::vector<const SafetensorsEntry*> out;
  std::vector<std::string> missing, unexpected;
  for (const Parameter& parameter : table.parameters()) {
    const auto found = names.find(parameter.name);
    if (found == names.end() && !parameter.added && !may_be_absent(parameter.name, head))
      missing.push_back(parameter.name);
    out.push_back(found == names.end() ? nullptr : found->second);
  }
  for (const auto& [name, entry] : names)
    if (!table.contains(name) && !table.elsewhere(name) && !name.ends_with("rotary_emb.inv_freq"))
      unexpected.push_back(name);
  // An index may name tensors that the model does not need: transformers writes a tied head into it, but into no file.
  if (!missing.empty() && !tensors.absent.empty()) {
    const auto needed = std::ranges::find_if(
        tensors.absent, [&](const auto& one) { return std::ranges::find(missing, one.first) != missing.end(); });
    const auto& [name, file] = needed == tensors.absent.end() ? *tensors.absent.begin() : *needed;
    throw InputError({tensors.where.string(), "tensor '" + printable(name) + "' in '" + file + "'", "none there",
                      "Fetch the model again"});
  }
  if (!missing.empty() || !unexpected.empty()) {
    std::string got;
    if (!missing.empty()) got = text_of(missing.size(), " missing: ", first_few(missing));
    if (!unexpected.empty())
      got += text_of(got.empty() ? "" : "; ", unexpected.size(), " unexpected: ", first_few(unexpected));
    throw InputError({tensors.where.string(), text_of("the ", out.size(), " tensors of the model's config"), got,
                      remedy_for(missing, unexpected)});
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] == nullptr) continue;
    const Parameter& parameter = table.parameters()[i];
    const std::string where = tensors.where.string() + ": tensor '" + parameter.name + "'";
    if (const std::vector<std::int64_t> whole = parameter.whole_shape(); out[i]->shape != whole)
      throw InputError({where, "shape " + shape_text(whole), shape_text(out[i]->shape),
                        "Does config.json belong to these weights?"});
    if (!is_floating(out[i]->type))
      throw UnsupportedError({where, "F64, F32, F16 or BF16", name_of(out[i]->type),
                              "Quantised weights cannot be trained; use the original weights"});
  }
  return out;
}

// Reads what is kept of the parameter's shard of the entry. Padding is not written.
void load_shard(const SafetensorsEntry& entry, const Parameter& parameter, const Kept& kept, DType dtype,
                std::byte* flat) {
  std::vector<std::byte> room;
  const std::vector<ShardRun> runs = runs_of(parameter, kept);
  if (runs.empty()) return;
  const std::byte* const values = values_of(entry, room);
  for (const ShardRun& run : runs)
    convert_values(entry.type, values + run.whole * bytes_of(entry.type), dtype, flat + run.local * bytes_of(dtype),
                   run.count);
}

void load(const Tensors& tensors, const ParameterTable& table, DType dtype, void* flat, const ElementProgress& progress,
          ValueHead head) {
  const std::vector<const SafetensorsEntry*> entries = match(tensors, table, head);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Parameter& parameter = table.parameters()[i];
    const Kept kept = table.kept(parameter);
    std::byte* const out = static_cast<std::byte*>(flat);
    if (entries[i] != nullptr) {
      load_shard(*entries[i], parameter, kept, dtype, out);
      forget_pages(*entries[i]);  // else the process holds the file beside the weights
    } else if (parameter.name == kValueBias) {
      std::memset(out + kept.place * bytes_of(dtype), 0, static_cast<std::size_t>(kept.count * bytes_of(dtype)));
    }
    if (progress) progress(parameter.offset + parameter.count, table.size());
  }
}

nf4::Rounding rounding_of(TensorType type) {
  if (type == TensorType::BF16) return nf4::Rounding::bfloat16;
  return type == TensorType::F16 ? nf4::Rounding::float16 : nf4::Rounding::float32;
}

// The matrix as a quantised model's files have it; else quantised.
std::shared_ptr<const quantised::Matrix> quantised_as(const quantised::Form& form, const SafetensorsEntry& entry,
                                                      const std::string& where) {
  const std::string place = where + ": tensor '" + entry.name + "'";
  if (entry.quantised && entry.quantised->form().kind == form.kind) {
    if (entry.quantised->form() == form) return entry.quantised;
    throw InputError({place, form.nested ? "nested absmax, as config.json says" : "absmax that is not nested",
                      form.nested ? "absmax that is not nested" : "nested absmax",
                      "Correct bnb_4bit_use_double_quant in config.json"});
  }
  if (entry.type == TensorType::F64)
    throw UnsupportedError(
        {place, "F32, F16 or BF16, which --weights nf4 quantises", name_of(entry.type), "leave --weights out"});
  if (is_fp8(entry)) return quantised_as(form, in_bfloat16(entry), where);  // NF4 of the model that would be saved
  std::vector<std::byte> room;
  const std::byte* const values = values_of(entry, room);
  const std::int64_t columns = entry.shape[1];
  return std::make_shared<const nf4::Matrix>(
      nf4::quantise(entry.shape[0], columns, rounding_of(entry.type), [&](std::int64_t row, float* out) {
        convert_values(entry.type, values + row * columns * bytes_of(entry.type), DType::float32, out, columns);
      }));
}

}  // namespace

void write_quantised(const quantised::Matrix& matrix, const Parameter& p, void* flat) {
  std::byte* out = static_cast<std::byte*>(flat) + p.offset;
  const std::vector<Shard::Range> rows =
      p.shard.dim == 0 ? p.shard.ranges() : std::vector<Shard::Range>{{0, p.shape[0]}};
  const std::int64_t first = p.shard.dim == 1 ? p.shard.begin : 0, end = p.shard.dim == 1 ? p.shard.end : p.shape[1];
  for (const Shard::Range& range : rows)
    for (std::int64_t n = range.begin; n < range.end; ++n, out += p.quantised_row)
      matrix.write_row(n, first, end, p.shape[1], out);
}

void load_quantised(const fs::path& directory, const ParameterTable& table, const quantised::Form& form, void* flat,
                    const ElementProgress& progress, ValueHead head) {
  const Tensors tensors = open_model(directory);
  const std::vector<const SafetensorsEntry*> entries = match(tensors, table, head);
  const quantised::Rows& rows = quantised::rows_of(form.kind);
  const auto is_stored_so = [&](const SafetensorsEntry& entry) {
    return entry.quantised && entry.quantised->form().kind == form.kind;
  };
  const bool quantised =
      std::ranges::any_of(tensors.by_name, [&](const auto& item) { return is_stored_so(*item.second); });
  std::int64_t done = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Parameter& p = table.parameters()[i];
    if (quantised && !is_stored_so(*entries[i]))
      throw UnsupportedError(
          {directory.string() + ": tensor '" + p.name + "'",
           text_of(rows.name, ", since config.json does not name its module in ", rows.left_out_member),
           name_of(entries[i]->type), "leave --weights out: matrices are then held in the model's dtype"});
    write_quantised(*quantised_as(form, *entries[i], directory.string()), p, flat);
    forget_pages(*entries[i]);
    done += p.shape[0] * p.shape[1];
    if (progress) progress(done, 0);
  }
}

void load_parameters(const fs::path& directory, const ParameterTable& table, DType dtype, void* flat,
                     const ElementProgress& progress, ValueHead head) {
  load(open_model(directory), table, dtype, flat, progress, head);
}

namespace {

bool has_weights(const fs::path& directory) {
  return fs::exists(directory / "model.safetensors") || fs::exists(directory / "model.safetensors.index.json");
}

}  // namespace

std::optional<DType> stored_dtype(const fs::path& directory) {
  if (!has_weights(directory)) return std::nullopt;
  const Tensors tensors = open_model(directory);
  std::map<DType, std::int64_t> numbers;
  for (const auto& [name, entry] : tensors.by_name) {
    if (is_fp8(*entry)) {
      numbers[DType::bfloat16] += entry->count;
      continue;
    }
    if (entry->type == TensorType::F64) numbers[DType::float64] += entry->count;
    if (entry->type == TensorType::F32 || entry->type == TensorType::F16) numbers[DType::float32] += entry->count;
    if (entry->type == TensorType::BF16) numbers[DType::bfloat16] += entry->count;
  }
  if (numbers.empty()) return std::nullopt;
  return std::ranges::max_element(numbers, {}, [](const auto& item) { return item.second; })->first;
}

std::int64_t further_layer_tensors(const fs::path& directory) {
  return has_weights(directory) ? open_model(directory).further : 0;
}
bool has_tensors_beside(const fs::path& directory) {
  return has_weights(directory) && !open_model(directory).beside.empty();
}

void load_named_tensors(const fs::path& file, const ParameterTable& table, DType dtype, void* flat,
                        const ElementProgress& progress) {
  Tensors tensors;
  tensors.where = file;
  open_file(file, tensors);
  take_rows_apart(tensors, table);
  take_apart(tensors);
  load(tensors, table, dtype, flat, progress, ValueHead::stored);
}

struct StoredTensors::Files {
  Tensors tensors;
  std::map<std::string, const SafetensorsEntry*> by_name;
};

StoredTensors::StoredTensors(const fs::path& directory) : files_(std::make_unique<Files>()) {
  files_->tensors = open_model(directory);
  files_->by_name = table_names(files_->tensors);
}
StoredTensors::StoredTensors(const fs::path& directory, const ParameterTable& table, ValueHead head)
    : StoredTensors(directory) {
  match(files_->tensors, table, head);
}
StoredTensors::~StoredTensors() = default;

std::vector<fs::path> StoredTensors::files() const {
  std::vector<fs::path> out;
  for (const SafetensorsFile& file : files_->tensors.files) out.push_back(file.path());
  return out;
}

bool StoredTensors::has(const std::string& name) const { return files_->by_name.contains(name); }

const std::vector<const SafetensorsEntry*>& StoredTensors::beside_text() const { return files_->tensors.beside; }

const SafetensorsEntry& StoredTensors::at(const std::string& name) const {
  auto found = files_->by_name.find(name);
  if (found == files_->by_name.end() && name == kEmbeddingName) found = files_->by_name.find(kHeadName);  // tied
  if (found == files_->by_name.end())
    throw InputError({files_->tensors.where.string(), "tensor '" + name + "', which was there when the run began",
                      "no such tensor", "Restore the directory; the run copies what it does not train from there"});
  return *found->second;
}

}  // namespace espalier
