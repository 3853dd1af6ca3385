// Weights of a Hugging Face model directory to and from one flat buffer laid out by a ParameterTable.
//
// `flat` holds table.kept_size() elements of the stated dtype.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/checkpoint/file_tensors.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/model/parameters.h"

namespace espalier {
namespace quantised {
struct Form;
class Matrix;
}  // namespace quantised

// Called from the loading or writing thread after every tensor: elements done and in all.
using ElementProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// Where a critic's head comes from (tables without one: no matter).
enum class ValueHead {
  stored,  // score.weight and score.bias; a bias that is not stored is 0, as in transformers
  fresh,  // not from the files: the weight stays as it is in `flat`, the bias is 0, a language model's head is left out
};

// Overwrites flat with the weights of model.safetensors, or of the shards that model.safetensors.index.json names,
// converted from F64, F32, F16 or BF16 to dtype. As Hugging Face does: names without the prefix "model." are taken
// when no name has it; rotary inv_freq buffers are ignored; a head stored beside a tied one must be equal to the
// embedding, and may stand for it when the embedding is absent. Only this rank's part of a sharded tensor is
// read; padding in flat stays as it is.
// Errors: InputError naming the file and the first few missing, unexpected or misshapen tensors; UnsupportedError for
// weights in other number formats (quantised models) and for pickled weights.
void load_parameters(const std::filesystem::path& directory, const ParameterTable& table, DType dtype, void* flat,
                     const ElementProgress& progress = {}, ValueHead head = ValueHead::stored);

// The same for a table of quantised parameters, as rows of bytes (base/quantised_rows.h): as the directory has them, or
// quantised from float32, float16 or bfloat16. `progress` counts elements, its total is 0. Further errors:
// UnsupportedError for a matrix of float64, and for one that a quantised model's files hold in another form than its
// config says; InputError for scales of another form than `form`.
void load_quantised(const std::filesystem::path& directory, const ParameterTable& table, const quantised::Form& form,
                    void* flat, const ElementProgress& progress = {}, ValueHead head = ValueHead::stored);

// Overwrites the parameter's rows in a table of quantised parameters with this rank's part of a whole matrix.
void write_quantised(const quantised::Matrix& matrix, const Parameter& parameter, void* flat);

// The dtype of most numbers in a model's weight files, float32 for float16; empty without weights. config.json may
// differ. Reads only headers. Errors: as load_parameters for damaged or missing files.
std::optional<DType> stored_dtype(const std::filesystem::path& directory);

// Tensors of layers that predict further tokens (MTP: GLM-4.5, DeepSeek-V3, Qwen3-Next). They do not run, and a model
// that is written holds them as they are. 0 without weights. Errors: as load_parameters for damaged or missing files.
std::int64_t further_layer_tensors(const std::filesystem::path& directory);
// True if files hold tensors that no parameter is, and that a model written from them has all the same: of towers, of
// layers that do not run, and factors of layers.
bool has_tensors_beside(const std::filesystem::path& directory);

// load_parameters from one safetensors file of any name, such as a checkpoint of a trace.
void load_named_tensors(const std::filesystem::path& file, const ParameterTable& table, DType dtype, void* flat,
                        const ElementProgress& progress = {});

// The stored tensors of a model directory, so that a run can write held ones again bit for bit.
class StoredTensors {
 public:
  // Errors: as load_parameters, for damaged files.
  explicit StoredTensors(const std::filesystem::path& directory);
  // The same, after every tensor of the table was found there. Errors: as load_parameters.
  StoredTensors(const std::filesystem::path& directory, const ParameterTable& table,
                ValueHead head = ValueHead::stored);
  ~StoredTensors();

  std::vector<std::filesystem::path> files() const;
  bool has(const std::string& name) const;
  // Errors: InputError where the directory has no such tensor any more.
  const SafetensorsEntry& at(const std::string& name) const;

  // The tensors outside the text model: of a vision tower, and of layers that predict further tokens.
  const std::vector<const SafetensorsEntry*>& beside_text() const;

 private:
  struct Files;
  std::unique_ptr<Files> files_;
};

struct WriteOptions {
  std::int64_t shard_bytes = 5'000'000'000;         // a weight file grows no larger, unless one tensor is
  const StoredTensors* stored = nullptr;            // where parameters come from that are not `changed`; null: all are
  std::function<bool(const std::string&)> changed;  // by name
  bool of_sequences = false;  // a value head is that of a ...ForSequenceClassification, without a bias
  ElementProgress progress;
};

// Fills the directory `target` (usually AtomicDirectory::path(), created when absent) with a model: the weights as
// `to` in model.safetensors, or in shards with their index, and the content of the other files at the top of `source`:
// no weight files in any format, no hidden files, no folders. config.json is copied byte for byte if it fits; otherwise
// it is written anew with `to` as its dtype, without quantization_config, and as a token (sequence) classifier's with
// one label if the table has a value head. For ...ForConditionalGeneration the text model's weights get the names of
// the source, and all other tensors of the source are copied; so are layers that predict further tokens, unless the
// table has a value head. Errors: InputError for an unreadable source, OptionError for a failing output.
void write_model_directory(const std::filesystem::path& target, const std::filesystem::path& source,
                           const ParameterTable& table, DType from, const ParameterValues& values, DType to,
                           const WriteOptions& options = {});
void write_model_directory(const std::filesystem::path& target, const std::filesystem::path& source,
                           const ParameterTable& table, DType from, const void* flat, DType to,
                           const WriteOptions& options = {});

// One safetensors file with the table's parameters as dtype, in the tensors of the model's own files; complete or
// absent.
void write_named_tensors(const std::filesystem::path& file, const ParameterTable& table, DType dtype, const void* flat);

// The same with the parameters of several models, each under its prefix.
struct NamedTensors {
  std::string prefix;
  const ParameterTable& table;
  ParameterValues values;
  AddedNames added = AddedNames::own;
};
void write_named_tensors(const std::filesystem::path& file, const std::vector<NamedTensors>& models, DType dtype);

}  // namespace espalier
