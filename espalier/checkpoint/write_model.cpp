// Writing models and single files of named tensors.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/file_tensors.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/checkpoint/tensor_names.h"
#include "espalier/config/model_config.h"
#include "espalier/model/parameters.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

// The tensors of a model. A critic's bias of sequences is none, and parameters that keep their dtype are written as
// they are stored. So are the tensors beside the text model.
std::vector<FileTensor> model_tensors(const ParameterTable& table, const WriteOptions& options,
                                      const StoredTensors* beside) {
  std::vector<FileTensor> tensors = file_tensors(table);
  if (options.of_sequences) std::erase_if(tensors, [](const FileTensor& tensor) { return tensor.name == kValueBias; });
  for (FileTensor& tensor : tensors) {
    const std::string& name = tensor.parts.front().parameter->name;
    if (options.stored == nullptr || !keeps_its_dtype(name)) continue;
    const SafetensorsEntry& entry = options.stored->at(name);
    tensor = {.name = tensor.name, .shape = entry.shape, .count = entry.count, .stored = &entry};
  }
  if (beside == nullptr) return tensors;
  for (const SafetensorsEntry* entry : beside->beside_text())
    tensors.push_back({.name = entry->name, .shape = entry->shape, .count = entry->count, .stored = entry});
  return tensors;
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

void write_tensors(OutputFile& output, const ParameterTable& table, const std::vector<FileTensor>& tensors, DType from,
                   const ParameterValues& values, DType to, const WriteOptions& options) {
  SafetensorsWriter writer(output, specs_of(tensors, to));
  const auto give = [&](const Parameter& parameter, const ValueSink& sink) {
    if (options.stored != nullptr && !options.changed(parameter.name)) {
      const SafetensorsEntry& entry = options.stored->at(parameter.name);
      std::vector<std::byte> room;
      give_converted(sink, entry.type, values_of(entry, room), to, parameter.count);
      forget_pages(entry);
    } else {
      give_converted(sink, tensor_type_of(from), values(parameter), to, parameter.count);
    }
    if (options.progress) options.progress(parameter.offset + parameter.count, table.size());
  };
  for (const FileTensor& tensor : tensors) append_tensor(writer, tensor, to, give);
  writer.finish();
}

void write_weights(const fs::path& target, const ParameterTable& table, DType from, const ParameterValues& values,
                   DType to, const WriteOptions& options, const StoredTensors* beside) {
  const std::vector<FileTensor> tensors = model_tensors(table, options, beside);
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
    const std::vector<FileTensor> here(tensors.begin() + static_cast<std::ptrdiff_t>(shards[i].begin),
                                       tensors.begin() + static_cast<std::ptrdiff_t>(shards[i].end));
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

// The config with its dtype set to that of the weights; untouched text where it already says so. transformers calls the
// member "dtype" from version 5 on and "torch_dtype" before; absent it means float32.
void write_config(const fs::path& from, const fs::path& to, DType dtype, const ParameterTable& table,
                  bool of_sequences) {
  Json config = read_json_object(from);
  bool stated = false, changed = table.contains(kValueWeight) && state_value_head(config, of_sequences);
  // A tied config beside a head of its own: the head was untied when it was read.
  if (table.contains(kHeadName) && config.contains("architectures") && config_ties_head(from)) {
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
  if (is_beside_vision(config) || (!critic && has_tensors_beside(source))) beside.emplace(source);
  write_weights(target, table, from, values, to, options, beside ? &*beside : nullptr);
}

void write_named_tensors(const fs::path& file, const ParameterTable& table, DType dtype, const void* flat) {
  write_named_tensors(file, {{"", table, values_of(flat, bytes_of(dtype))}}, dtype);
}

void write_named_tensors(const fs::path& file, const std::vector<NamedTensors>& models, DType dtype) {
  std::vector<std::vector<FileTensor>> tensors;
  std::vector<TensorSpec> specs;
  for (const NamedTensors& model : models) {
    tensors.push_back(file_tensors(model.table, model.added));
    for (TensorSpec& spec : specs_of(tensors.back(), dtype, model.prefix)) specs.push_back(std::move(spec));
  }
  AtomicFile output(file);
  SafetensorsWriter writer(output.output(), specs);
  for (std::size_t i = 0; i < models.size(); ++i)
    for (const FileTensor& tensor : tensors[i])
      append_tensor(writer, tensor, dtype, [&](const Parameter& parameter, const ValueSink& sink) {
        give_converted(sink, tensor_type_of(dtype), models[i].values(parameter), dtype, parameter.count);
      });
  writer.finish();
  output.commit();
}

}  // namespace espalier
