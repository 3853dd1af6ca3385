#include "espalier/options/choices.h"

#include "espalier/base/error.h"

namespace espalier {

std::span<const char* const> words_of(DType) {
  static const char* const kWords[] = {name_of(DType::float64), name_of(DType::float32), name_of(DType::bfloat16)};
  return kWords;
}

std::span<const char* const> words_of(AttentionKernels) {
  static constexpr const char* kWords[] = {"auto",
#define ESPALIER_ROW(name, word, ...) word,
                                           ESPALIER_ATTENTION_KERNELS(ESPALIER_ROW)
#undef ESPALIER_ROW
  };
  return kWords;
}

std::span<const char* const> words_of(PolicyLoss) {
  static constexpr const char* kWords[] = {
#define ESPALIER_POLICY_LOSS(name, ...) #name,
#include "espalier/options/policy_losses.def"
  };
  return kWords;
}

std::span<const char* const> words_of(KlLossType) {
  static constexpr const char* kWords[] = {
#define ESPALIER_KL_TYPE(name, word, estimator, gradient) word,
#include "espalier/options/kl_types.def"
  };
  return kWords;
}

const char* name_of(AttentionKernels value) { return words_of(value)[static_cast<std::size_t>(value)]; }
const char* name_of(PolicyLoss value) { return words_of(value)[static_cast<std::size_t>(value)]; }
const char* name_of(KlLossType value) { return words_of(value)[static_cast<std::size_t>(value)]; }

std::size_t place_among(std::span<const char* const> words, std::string_view word, std::string_view where) {
  for (std::size_t i = 0; i < words.size(); ++i)
    if (word == words[i]) return i;
  throw OptionError({std::string(where), "one of " + joined(words), '"' + std::string(word) + '"', ""});
}

std::string joined(std::span<const char* const> words) {
  std::string out;
  for (const std::string_view word : words) {
    if (word.empty()) continue;
    if (!out.empty()) out += '|';
    out += word;
  }
  return out;
}

const PolicyLossRow& row_of(PolicyLoss loss) {
  enum class Sees { token, rollout };
  enum class Allowed { any, seq_mean_token_mean };
  enum class RatioTo { old, sampler };
  enum class Cap { free, capped };
  static constexpr PolicyLossRow kRows[] = {
#define ESPALIER_POLICY_LOSS(name, sees, by_default, allowed, ratio, sequence_ratio, cap, weights) \
  {Sees::sees == Sees::rollout,                                                                    \
   Aggregation::by_default,                                                                        \
   Allowed::allowed == Allowed::any,                                                               \
   RatioTo::ratio == RatioTo::sampler,                                                             \
   SequenceRatio::sequence_ratio,                                                                  \
   Cap::cap == Cap::capped,                                                                        \
   LossWeights::weights},
#include "espalier/options/policy_losses.def"
  };
  return kRows[static_cast<std::size_t>(loss)];
}

}  // namespace espalier
