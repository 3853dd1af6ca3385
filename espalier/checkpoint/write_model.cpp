// Writing models and single files of named tensors.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/half_block_names.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/packed_experts.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/config/model_config.h"
#include "espalier/model/parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kHead = "lm_head.weight";

// A tensor of the files: a parameter, neighbours that the family stores as one, or what is written as it is stored.
struct FileTensor {
  std::string name;
  std::size_t begin, end;  // parameters
  std::vector<std::int64_t> shape;
  std::int64_t count;
  const SafetensorsEntry* stored = nullptr;
  Packed packed = Packed::none;  // of the parameters

  TensorType type(DType to) const { return stored != nullptr ? stored->type : tensor_type_of(to); }
  std::int64_t bytes(DType to) const { return count * bytes_of(type(to)); }
};

// Experts of a layer end to end, in Granite 4's files: so many parameters, the shape of one of them. Empty: no such
// tensor.
std::vector<std::int64_t> stacked_shape(const std::string& name, std::size_t parts,
                                        const std::vector<std::int64_t>& part) {
  const auto count = static_cast<std::int64_t>(parts);
  if (name.ends_with(".block_sparse_moe.output_linear.weight")) return {count, part[0], part[1]};
  if (name.ends_with(".block_sparse_moe.input_linear.weight")) return {count / 2, 2 * part[0], part[1]};
  return {};
}

std::vector<FileTensor> file_tensors(const ParameterTable& table, const WriteOptions& options) {
  std::vector<FileTensor> tensors;
  const std::vector<Parameter>& parameters = table.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    if (options.of_sequences && p.name == kValueBias) {
      ESPALIER_INTERNAL(i + 1 == parameters.size(), "parameters behind the value head");  // ranges have no holes
      break;
    }
    if (options.stored != nullptr && keeps_its_dtype(p.name)) {
      const SafetensorsEntry& entry = options.stored->at(p.name);
      tensors.push_back({p.name, i, i, entry.shape, entry.count, &entry});
      continue;
    }
    if (!p.fused.empty() && i > 0 && parameters[i - 1].fused == p.fused) {
      FileTensor& last = tensors.back();
      last.count += p.count;
      ++last.end;
      if (const auto stacked = stacked_shape(p.fused, last.end - last.begin, p.shape); !stacked.empty())
        last.shape = stacked;
      else if (last.packed == Packed::none)
        last.shape[0] += p.shape[0];
      else
        last.shape = packed_shape(last.packed, static_cast<std::int64_t>(last.end - last.begin), p.shape);
    } else if (packed_as(p.fused) != Packed::none) {
      tensors.push_back({p.fused, i, i + 1, packed_shape(packed_as(p.fused), 1, p.shape), p.count});
      tensors.back().packed = packed_as(p.fused);
    } else {
      const std::vector<std::int64_t> stacked = stacked_shape(p.fused, 1, p.shape);
      tensors.push_back({p.fused.empty() ? p.name : p.fused, i, i + 1, stacked.empty() ? p.shape : stacked, p.count});
    }
  }
  return tensors;
}

// Under the names of a model with a vision tower, and with the tensors that are no part of the text model.
void put_beside_text(std::vector<FileTensor>& tensors, const StoredTensors& source) {
  for (FileTensor& tensor : tensors) tensor.name = source.file_name(tensor.name);
  for (const SafetensorsEntry* entry : source.beside_text())
    tensors.push_back({entry->name, 0, 0, entry->shape, entry->count, entry});
}

struct FileShard {
  std::size_t begin = 0, end = 0;  // tensors
};

std::vector<FileShard> cut_shards(const std::vector<FileTensor>& tensors, DType to, std::int64_t shard_bytes) {
  std::vector<FileShard> shards(1);
  std::int64_t used = 0;
  for (const FileTensor& tensor : tensors) {
    const std::int64_t bytes = tensor.bytes(to);
    if (used > 0 && used + bytes > shard_bytes) {
      shards.push_back({shards.back().end, shards.back().end});
      used = 0;
    }
    used += bytes;
    ++shards.back().end;
  }
  return shards;
}

// Takes converted values, in pieces.
using Sink = std::function<void(const void* values, std::int64_t bytes)>;

void append_converted(const Sink& sink, TensorType from, const std::byte* values, DType to, std::int64_t count) {
  if (from == tensor_type_of(to)) return sink(values, count * bytes_of(to));
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(kPiece, count) * bytes_of(to)));
  for (std::int64_t begin = 0; begin < count; begin += kPiece) {
    const std::int64_t size = std::min(kPiece, count - begin);
    convert_values(from, values + begin * bytes_of(from), to, piece.data(), size);
    sink(piece.data(), size * bytes_of(to));
  }
}

// The slices of all experts, one after the other.
void write_packed(SafetensorsWriter& writer, const FileTensor& tensor, const ParameterTable& table, DType to,
                  const std::function<void(const Parameter&, const Sink&)>& give) {
  const std::vector<Parameter>& parameters = table.parameters();
  const std::size_t each = tensor.packed == Packed::gate_up || tensor.packed == Packed::gate_up_bias ? 2 : 1;
  std::array<std::vector<std::byte>, 2> parts;
  std::vector<std::byte> slice;
  for (std::size_t i = tensor.begin; i < tensor.end; i += each) {
    for (std::size_t j = 0; j < each; ++j) {
      parts[j].clear();
      give(parameters[i + j], [&](const void* values, std::int64_t bytes) {
        const auto* const begin = static_cast<const std::byte*>(values);
        parts[j].insert(parts[j].end(), begin, begin + bytes);
      });
    }
    slice.resize(parts[0].size() * each);
    pack(tensor.packed, parameters[i].shape, bytes_of(to), parts[0].data(), parts[1].data(), slice.data());
    writer.append(slice.data(), static_cast<std::int64_t>(slice.size()));
  }
}

void write_tensors(OutputFile& output, const ParameterTable& table, std::span<const FileTensor> tensors, DType from,
                   const ParameterValues& values, DType to, const WriteOptions& options) {
  std::vector<TensorSpec> specs;
  for (const FileTensor& tensor : tensors) specs.push_back({tensor.name, tensor.type(to), tensor.shape});
  SafetensorsWriter writer(output, specs);
  for (const FileTensor& tensor : tensors) {
    if (tensor.stored != nullptr) {
      std::vector<std::byte> room;
      writer.append(values_of(*tensor.stored, room), tensor.stored->bytes);
      forget_pages(*tensor.stored);
    }
    const auto give = [&](const Parameter& parameter, const Sink& sink) {
      if (options.stored != nullptr && !options.changed(parameter.name)) {
        const SafetensorsEntry& entry = options.stored->at(parameter.name);
        std::vector<std::byte> room;
        append_converted(sink, entry.type, values_of(entry, room), to, parameter.count);
        forget_pages(entry);
      } else {
        append_converted(sink, tensor_type_of(from), static_cast<const std::byte*>(values(parameter)), to,
                         parameter.count);
      }
      if (options.progress) options.progress(parameter.offset + parameter.count, table.size());
    };
    if (tensor.packed != Packed::none) {
      write_packed(writer, tensor, table, to, give);
      continue;
    }
    for (std::size_t i = tensor.begin; i < tensor.end; ++i)
      give(table.parameters()[i], [&](const void* piece, std::int64_t bytes) { writer.append(piece, bytes); });
  }
  writer.finish();
}

// Nemotron-H's files have other names.
void name_half_blocks(std::vector<FileTensor>& tensors) {
  std::vector<std::string> names;
  for (const FileTensor& tensor : tensors) names.push_back(tensor.name);
  const std::map<std::string, std::string> of_files = names_of_half_blocks(names);
  for (FileTensor& tensor : tensors)
    if (const auto found = of_files.find(tensor.name); found != of_files.end()) tensor.name = found->second;
}

void write_weights(const fs::path& target, const ParameterTable& table, DType from, const ParameterValues& values,
                   DType to, const WriteOptions& options, const StoredTensors* beside, bool half_blocks) {
  std::vector<FileTensor> tensors = file_tensors(table, options);
  if (half_blocks) name_half_blocks(tensors);
  if (beside != nullptr) put_beside_text(tensors, *beside);
  const std::vector<FileShard> shards = cut_shards(tensors, to, options.shard_bytes);
  Json weight_map = Json::object();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    std::string name = "model.safetensors";
    if (shards.size() > 1) {
      char numbered[64];
      std::snprintf(numbered, sizeof numbered, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
      name = numbered;
    }
    OutputFile output(target / name);
    const auto here = std::span(tensors).subspan(shards[i].begin, shards[i].end - shards[i].begin);
    write_tensors(output, table, here, from, values, to, options);
    output.close_synced();
    for (const FileTensor& tensor : here) weight_map[tensor.name] = name;
  }
  if (shards.size() == 1) return;
  Json index;
  std::int64_t bytes = 0;
  for (const FileTensor& tensor : tensors) bytes += tensor.bytes(to);
  index["metadata"]["total_size"] = bytes;
  index["weight_map"] = std::move(weight_map);
  write_json_file(target / "model.safetensors.index.json", index);
}

// Weights of any format, their indices, and what belongs to other trainers' optimizers.
bool is_weight_file(const std::string& name) {
  for (const char* ending : {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot",
                             ".index.json", ".npz", ".ckpt"})
    if (name.ends_with(ending)) return true;
  return false;
}

void copy_content(const fs::path& from, const fs::path& to) {
  const int descriptor = ::open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw InputError({from.string(), "a readable file", std::strerror(errno), ""});
  struct Closer {
    int number;
    ~Closer() { ::close(number); }
  } closer{descriptor};
  OutputFile output(to);
  std::vector<char> buffer(std::size_t{1} << 18);
  for (;;) {
    const ssize_t got = ::read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw InputError({from.string(), "a readable file", std::strerror(errno), ""});
    if (got == 0) break;
    output.write(buffer.data(), static_cast<std::size_t>(got));
  }
  output.close_synced();
}

// A language model's config as that of a token classifier with one label and a bias, or of a sequence classifier with
// one label; false: it is one already.
bool state_value_head(Json& config, bool of_sequences) {
  constexpr std::string_view kModel = "ForCausalLM";
  if (of_sequences) {
    std::string name = config["architectures"][0].get<std::string>();
    if (!name.ends_with(kModel)) return false;
    name.replace(name.size() - kModel.size(), kModel.size(), "ForSequenceClassification");
    config["architectures"] = Json::array({name});
    config["id2label"] = {{"0", "LABEL_0"}};
    config["label2id"] = {{"LABEL_0", 0}};
    return true;
  }
  const bool biased = config.value("token_classification_bias", true);
  if (!biased) config.erase("token_classification_bias");
  std::string name = config["architectures"][0].get<std::string>();
  if (!name.ends_with(kModel)) return !biased;
  name.replace(name.size() - kModel.size(), kModel.size(), "ForTokenClassification");
  config["architectures"] = Json::array({name});
  config["id2label"] = {{"0", "value"}};
  config["label2id"] = {{"value", 0}};
  config["classifier_dropout"] = 0.0;  // absent it means 0.1
  return true;
}

std::string architecture_of(const Json& config) {
  const auto names = config.find("architectures");
  return names != config.end() && names->is_array() && !names->empty() && (*names)[0].is_string()
             ? (*names)[0].get<std::string>()
             : std::string();
}
bool is_beside_vision(const Json& config) { return architecture_of(config).ends_with("ForConditionalGeneration"); }
bool has_half_blocks(const Json& config) {
  return architecture_of(config) == "NemotronHForCausalLM" || config.value("model_type", Json()) == "nemotron_h";
}

// The config with its dtype set to that of the weights; untouched text where it already says so. transformers calls the
// member "dtype" from version 5 on and "torch_dtype" before; absent it means float32.
void write_config(const fs::path& from, const fs::path& to, DType dtype, const ParameterTable& table,
                  bool of_sequences) {
  Json config = read_json_object(from);
  bool stated = false, changed = table.contains(kValueWeight) && state_value_head(config, of_sequences);
  // A tied config beside a head of its own: the head was untied when it was read.
  if (table.contains(kHead) && config.contains("architectures") && config_ties_head(from)) {
    config["tie_word_embeddings"] = false;
    changed = true;
  }
  changed = config.erase("quantization_config") > 0 || changed;  // what is written is not quantised
  const auto restate = [&](Json& members) {
    for (const char* member : {"dtype", "torch_dtype"}) {
      const auto found = members.find(member);
      if (found == members.end() || found->is_null()) continue;
      stated = true;
      if (*found == name_of(dtype)) continue;
      *found = name_of(dtype);
      changed = true;
    }
  };
  restate(config);
  if (is_beside_vision(config) && config.contains("text_config")) restate(config["text_config"]);
  if (!stated && dtype != DType::float32) {
    config["torch_dtype"] = name_of(dtype);
    changed = true;
  }
  if (changed)
    write_json_file(to, config);
  else
    copy_content(from, to);
}

void copy_other_files(const fs::path& source, const fs::path& target, DType to, const ParameterTable& table,
                      bool of_sequences) {
  std::error_code failure;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(source, failure), end; !failure && entry != end; entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    std::error_code dangling;
    if (!name.starts_with('.') && !is_weight_file(name) && entry->is_regular_file(dangling))
      files.push_back(entry->path());
  }
  if (failure) throw InputError({source.string(), "a readable model directory", failure.message(), ""});
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    if (file.filename() == "config.json")
      write_config(file, target / "config.json", to, table, of_sequences);
    else
      copy_content(file, target / file.filename());
  }
}

}  // namespace

void write_model_directory(const fs::path& target, const fs::path& source, const ParameterTable& table, DType from,
                           const void* flat, DType to, const WriteOptions& options) {
  write_model_directory(target, source, table, from, values_of(flat, bytes_of(from)), to, options);
}

void write_model_directory(const fs::path& target, const fs::path& source, const ParameterTable& table, DType from,
                           const ParameterValues& values, DType to, const WriteOptions& options) {
  if (::mkdir(target.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(target, "create this directory", errno);
  std::error_code ignored;
  ESPALIER_INTERNAL(!fs::equivalent(source, target, ignored), "a model cannot be written over its own source");
  const bool critic = table.contains(kValueWeight);
  copy_other_files(source, target, to, table, options.of_sequences);
  const Json config = read_json_object(source / "config.json");
  std::optional<StoredTensors> beside;
  if (is_beside_vision(config) || (!critic && has_further_layers(source))) beside.emplace(source);
  write_weights(target, table, from, values, to, options, beside ? &*beside : nullptr, has_half_blocks(config));
}

void write_named_tensors(const fs::path& file, const ParameterTable& table, DType dtype, const void* flat) {
  write_named_tensors(file, {{"", table, values_of(flat, bytes_of(dtype))}}, dtype);
}

void write_named_tensors(const fs::path& file, const std::vector<NamedTensors>& models, DType dtype) {
  std::vector<AdapterTensors> tensors;
  std::vector<TensorSpec> specs;
  for (const NamedTensors& model : models) {
    const AdapterTensors& added = tensors.emplace_back(model.adapters, model.table, model.prefix);
    for (TensorSpec& spec : added.specs(dtype)) specs.push_back(std::move(spec));
  }
  AtomicFile output(file);
  SafetensorsWriter writer(output.output(), specs);
  for (std::size_t i = 0; i < models.size(); ++i) tensors[i].append(writer, dtype, models[i].values, dtype);
  writer.finish();
  output.commit();
}

}  // namespace espalier
