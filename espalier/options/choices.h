// Options that are one of a few words, as enums: choices.def, policy_losses.def,
// kl_types.def, attention_kernels.h. Words are compared in
// this folder alone; everybody else has the enum.
#pragma once

#include <cstddef>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

#include "espalier/base/dtype.h"
#include "espalier/options/attention_kernels.h"

namespace espalier {

#define ESPALIER_CHOICE(Type, words) enum class Type { words };
#define ESPALIER_WORD(name, word) name,
#include "espalier/options/choices.def"

enum class PolicyLoss {
#define ESPALIER_POLICY_LOSS(name, ...) name,
#include "espalier/options/policy_losses.def"
};

enum class KlLossType {
#define ESPALIER_KL_TYPE(name, word, estimator, gradient) name,
#include "espalier/options/kl_types.def"
};

// words_of(E{}): the words of an enum, by enumerator. name_of(value): its word.
#define ESPALIER_CHOICE(Type, words)                   \
  inline std::span<const char* const> words_of(Type) { \
    static constexpr const char* kWords[] = {words};   \
    return kWords;                                     \
  }                                                    \
  inline const char* name_of(Type value) { return words_of(value)[static_cast<std::size_t>(value)]; }
#define ESPALIER_WORD(name, word) word,
#include "espalier/options/choices.def"

std::span<const char* const> words_of(DType);
std::span<const char* const> words_of(AttentionKernels);
std::span<const char* const> words_of(PolicyLoss);
std::span<const char* const> words_of(KlLossType);
const char* name_of(PolicyLoss value);
const char* name_of(AttentionKernels value);
const char* name_of(KlLossType value);

// The index of `word`. Errors: OptionError with `where` for an unknown word.
std::size_t place_among(std::span<const char* const> words, std::string_view word, std::string_view where);

// "auto|dense|packed": the accepted words.
std::string joined(std::span<const char* const> words);

// A choice as a member of Options: an enum that takes its words too.
template <class E>
class Choice {
 public:
  constexpr Choice(E value) : value_(value) {}
  Choice(std::string_view word, std::string_view where)
      : value_(static_cast<E>(place_among(words_of(E{}), word, where))) {}
  Choice(const char* word) : Choice(word, "a choice") {}
  Choice(const std::string& word) : Choice(word, "a choice") {}

  constexpr operator E() const { return value_; }
  friend constexpr bool operator==(Choice a, Choice b) { return a.value_ == b.value_; }
  friend constexpr bool operator==(Choice a, E b) { return a.value_ == b; }
  friend std::ostream& operator<<(std::ostream& out, Choice choice) { return out << name_of(choice.value_); }

 private:
  E value_;
};

// The gradient of a token's log-prob where its sequence has one ratio.
enum class SequenceRatio { none, own, mean };
// The place of the weights of --rollout-is in a loss.
enum class LossWeights { none, inside, factor };

// A row of policy_losses.def without its function.
struct PolicyLossRow {
  bool needs_whole_rollout;  // a token's derivative depends on other tokens of its rollout
  Aggregation by_default;
  bool any_aggregation;   // else `by_default` alone
  bool compares_sampler;  // its ratio is that to the sampler, else to the old policy
  SequenceRatio sequence_ratio;
  bool takes_cap;
  LossWeights weights;
};
const PolicyLossRow& row_of(PolicyLoss loss);

}  // namespace espalier
