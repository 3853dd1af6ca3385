#include "espalier/checkpoint/mapped_weights.h"

#include <sys/stat.h>

#include <algorithm>
#include <optional>

#include "espalier/base/dtype.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

struct Piece {
  std::size_t index;  // in the order of for_each_parameter
  std::string name;
  const std::byte* begin;  // null: not as it is read
  std::int64_t bytes;
};

// This rank's part of a matrix in the file.
Piece piece_of(const StoredTensors& stored, const Parameter& p, std::size_t index) {
  Piece out{index, p.name, nullptr, p.count * bytes_of(DType::bfloat16)};
  const SafetensorsEntry& entry = stored.at(p.name);
  const std::vector<ShardRun> runs = runs_of(p);
  const bool whole_rows = runs.size() == 1 && runs[0].count == p.count;
  if (entry.type != TensorType::BF16 || entry.unpack || !whole_rows) return out;
  const std::byte* const begin = entry.data + runs[0].whole * bytes_of(DType::bfloat16);
  if (reinterpret_cast<std::uintptr_t>(begin) % alignof(bfloat16) == 0) out.begin = begin;
  return out;
}

bool one_behind_the_other(const std::vector<Piece>& pieces) {
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (pieces[i].begin == nullptr || (i > 0 && pieces[i - 1].begin + pieces[i - 1].bytes != pieces[i].begin))
      return false;
  return true;
}

}  // namespace

MappedWeights::MappedWeights(const fs::path& directory, const LocalShape& shape, ValueHead head)
    : stored_(directory, ParameterTable(shape, Parameters::narrow), head) {
  for (const fs::path& file : stored_.files()) files_.push_back(state_of(file));
  const ParameterTable table(shape, Parameters::narrow);
  std::vector<bool> mapped;
  std::vector<Piece> together;
  ReadTogether product;
  const auto take = [&] {
    if (one_behind_the_other(together))
      for (const Piece& piece : together) mapped[piece.index] = true, values_.emplace(piece.name, piece.begin);
    together.clear();
  };
  for_each_parameter(shape.whole(), [&](const ParameterShape& parameter) {
    const std::size_t index = mapped.size();
    mapped.push_back(false);
    const Parameter* const here = table.find(parameter.name);
    if (here == nullptr) return;
    if (!parameter.read.is_product() || parameter.read != product) take();
    product = parameter.read;
    together.push_back(piece_of(stored_, *here, index));
  });
  take();
  if (!values_.empty()) parameters_ = std::make_shared<const std::vector<bool>>(std::move(mapped));
}

fs::path MappedWeights::changed_file() const {
  const auto changed = std::ranges::find_if(files_, [](const State& file) { return !(state_of(file.path) == file); });
  return changed == files_.end() ? fs::path() : changed->path;
}

MappedWeights::State MappedWeights::state_of(const fs::path& file) {
  struct stat status;
  if (::stat(file.c_str(), &status) != 0) return {file, 0, 0, -1, 0, 0};
  return {file, status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

}  // namespace espalier
