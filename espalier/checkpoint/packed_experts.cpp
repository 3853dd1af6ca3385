#include "espalier/checkpoint/packed_experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/strided_copy.h"

namespace espalier {
namespace {

constexpr std::int64_t kBlock = 32;  // numbers of MXFP4 with one exponent

using Tensors = std::map<std::string, const SafetensorsEntry*>;

const SafetensorsEntry* find(const Tensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : found->second;
}

// Splits the packed experts among a model's tensors.
class Splitter {
 public:
  Splitter(Tensors& tensors, std::list<SafetensorsEntry>& parts) : tensors_(tensors), parts_(parts) {}

  void split(const std::string& experts) {
    const SafetensorsEntry *const bias = find(tensors_, experts + "gate_up_proj_bias"), *const down_bias = find(
                                                                                            tensors_,
                                                                                            experts + "down_proj_bias");
    if (bias == nullptr || bias->shape.size() != 2 || bias->shape[1] % 2 != 0 || !is_plain(*bias)) return;
    if (down_bias == nullptr || down_bias->shape.size() != 2 || !is_plain(*down_bias)) return;
    E_ = bias->shape[0], F_ = bias->shape[1] / 2, M_ = down_bias->shape[1];
    if (down_bias->shape[0] != E_) return;
    for (const bool down : {false, true}) {
      split_matrix(experts, down);
      split_bias(experts, down ? *down_bias : *bias, down);
    }
  }

 private:
  static bool is_plain(const SafetensorsEntry& entry) {
    return is_floating(entry.type) && (bytes_of(entry.type) == 2 || bytes_of(entry.type) >= 4);
  }

  void add(const std::string& name, TensorType type, std::vector<std::int64_t> shape,
           std::function<void(std::byte*)> unpack) {
    SafetensorsEntry part{.name = name, .type = type, .shape = std::move(shape)};
    part.count = 1;
    for (const std::int64_t size : part.shape) part.count *= size;
    part.bytes = part.count * bytes_of(type);
    part.unpack = std::move(unpack);
    parts_.push_back(std::move(part));
    tensors_[name] = &parts_.back();
  }

  // [E, M, 2 F] or [E, F, M], or their blocks and scales.
  void split_matrix(const std::string& experts, bool down) {
    const std::string name = experts + (down ? "down_proj" : "gate_up_proj");
    const std::int64_t inputs = down ? F_ : M_, outputs = down ? M_ : 2 * F_;
    if (const SafetensorsEntry* const whole = find(tensors_, name)) {
      if (whole->shape != std::vector<std::int64_t>{E_, inputs, outputs} || !is_plain(*whole)) return;
      tensors_.erase(name);
      const std::int64_t element = bytes_of(whole->type);
      each_part(experts, down, [&](const std::string& part, std::int64_t e, std::int64_t first, std::int64_t step) {
        add(part, whole->type, {outputs / step, inputs}, [=](std::byte* out) {
          copy_strided(element, outputs / step, inputs, step, outputs, inputs, 1,
                       whole->data + (e * inputs * outputs + first) * element, out);
        });
      });
      return;
    }
    const SafetensorsEntry *const blocks = find(tensors_, name + "_blocks"), *const scales =
                                                                                 find(tensors_, name + "_scales");
    if (blocks == nullptr || scales == nullptr || inputs % kBlock != 0) return;
    if (blocks->type != TensorType::U8 || scales->type != TensorType::U8) return;
    if (blocks->shape != std::vector<std::int64_t>{E_, outputs, inputs / kBlock, kBlock / 2}) return;
    if (scales->shape != std::vector<std::int64_t>{E_, outputs, inputs / kBlock}) return;
    tensors_.erase(name + "_blocks");
    tensors_.erase(name + "_scales");
    each_part(experts, down, [&](const std::string& part, std::int64_t e, std::int64_t first, std::int64_t step) {
      add(part, TensorType::BF16, {outputs / step, inputs}, [=](std::byte* out) {
        for (std::int64_t n = 0; n < outputs / step; ++n) {
          const std::int64_t row = e * outputs + first + n * step;
          unpack_row(inputs, blocks->data + row * inputs / 2, scales->data + row * inputs / kBlock,
                     out + n * inputs * bytes_of(TensorType::BF16));
        }
      });
    });
  }

  static void unpack_row(std::int64_t count, const std::byte* blocks, const std::byte* scales, std::byte* out) {
    constexpr std::array<float, 8> kNumbers{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    constexpr int kBias = 127;
    std::array<float, kBlock> values;
    for (std::int64_t block = 0; block < count / kBlock; ++block) {
      const int exponent = std::to_integer<int>(scales[block]) - kBias;
      for (std::int64_t i = 0; i < kBlock; ++i) {
        const auto pair = std::to_integer<unsigned>(blocks[(block * kBlock + i) / 2]);
        const unsigned code = i % 2 == 0 ? pair & 15U : pair >> 4U;
        const float size = std::ldexp(kNumbers[code & 7U], exponent);
        values[static_cast<std::size_t>(i)] = (code & 8U) != 0 ? -size : size;
      }
      convert_values(TensorType::F32, reinterpret_cast<const std::byte*>(values.data()), DType::bfloat16,
                     out + block * kBlock * bytes_of(TensorType::BF16), kBlock);
    }
  }

  void split_bias(const std::string& experts, const SafetensorsEntry& whole, bool down) {
    const std::int64_t outputs = whole.shape[1], element = bytes_of(whole.type);
    tensors_.erase(whole.name);
    each_part(experts, down, [&](std::string part, std::int64_t e, std::int64_t first, std::int64_t step) {
      part.replace(part.rfind('.'), std::string::npos, ".bias");
      const std::byte* const from = whole.data + (e * outputs + first) * element;
      add(part, whole.type, {outputs / step},
          [=](std::byte* out) { copy_strided(element, outputs / step, 1, step, 1, 1, 1, from, out); });
    });
  }

  // Calls of_part(name of the weight, expert, first output of it, outputs from one of its own to the next).
  void each_part(const std::string& experts, bool down, auto&& of_part) {
    for (std::int64_t e = 0; e < E_; ++e) {
      const std::string expert = experts + std::to_string(e) + ".";
      if (down) {
        of_part(expert + "down_proj.weight", e, 0, 1);
      } else {
        of_part(expert + "gate_proj.weight", e, 0, 2);
        of_part(expert + "up_proj.weight", e, 1, 2);
      }
    }
  }

  Tensors& tensors_;
  std::list<SafetensorsEntry>& parts_;
  std::int64_t E_ = 0, M_ = 0, F_ = 0;
};

}  // namespace

void split_packed_experts(Tensors& tensors, std::list<SafetensorsEntry>& parts) {
  constexpr std::string_view kBias = ".experts.gate_up_proj_bias", kName = "gate_up_proj_bias";
  std::vector<std::string> experts;
  for (const auto& [name, entry] : tensors)
    if (name.ends_with(kBias)) experts.push_back(name.substr(0, name.size() - kName.size()));
  for (const std::string& prefix : experts) Splitter(tensors, parts).split(prefix);
}

}  // namespace espalier
