#include "espalier/options/values_elsewhere.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace espalier {
namespace {

struct Word {
  std::string_view option, word, meaning;
};

// Read as the row's own word. --save-dtype has the words of --dtype, too.
constexpr std::array kSpellings = {Word{"dtype", "bf16", "bfloat16"},
                                   Word{"dtype", "torch.bfloat16", "bfloat16"},
                                   Word{"dtype", "fp32", "float32"},
                                   Word{"dtype", "torch.float32", "float32"},
                                   Word{"dtype", "float", "float32"},
                                   Word{"dtype", "fp64", "float64"},
                                   Word{"dtype", "torch.float64", "float64"},
                                   Word{"dtype", "double", "float64"},
                                   Word{"adv-estimator", "reinforce++", "reinforce_plus_plus"},
                                   Word{"adv-estimator", "reinforce++-baseline", "reinforce_plus_plus_baseline"}};

constexpr std::string_view kVanilla = "vanilla is the clipped loss of PPO and of GRPO";
constexpr std::string_view kHalf = "there is no float16 here; bfloat16 is as small, float32 as exact";

// Refused with what to write instead.
constexpr std::array kRemedies = {
    Word{"policy-loss", "ppo", kVanilla},
    Word{"policy-loss", "ppo_clip", kVanilla},
    Word{"policy-loss", "clip", kVanilla},
    Word{"policy-loss", "grpo", kVanilla},
    Word{"policy-loss", "dr_grpo", "vanilla with --adv-estimator dr_grpo"},
    Word{"policy-loss", "dapo", "vanilla with --clip-ratio-high 0.28 and --loss-agg-mode token-mean"},
    Word{"policy-loss", "rloo", "reinforce, or vanilla, with --adv-estimator rloo"},
    Word{"policy-loss", "pg", "reinforce is the plain policy gradient"},
    Word{"adv-estimator", "ppo", "gae is PPO's, with --critic"},
    Word{"adv-estimator", "none", "given takes the advantages of the records"},
    Word{"dtype", "fp16", kHalf},
    Word{"dtype", "float16", kHalf},
    Word{"dtype", "half", kHalf},
    Word{"device", "gpu", "cuda is the name of a GPU"}};

template <std::size_t N>
std::string meaning_in(const std::array<Word, N>& words, const OptionRow& row, const std::string& value) {
  const std::string_view name = row.name, option = name == "save-dtype" ? "dtype" : name;
  const auto found =
      std::ranges::find_if(words, [&](const Word& each) { return each.option == option && each.word == value; });
  return found == words.end() ? "" : std::string(found->meaning);
}

}  // namespace

std::string own_word(const OptionRow& row, const std::string& value) {
  const std::string word = meaning_in(kSpellings, row, value);
  return word.empty() ? value : word;
}

std::string remedy_elsewhere(const OptionRow& row, const std::string& value) {
  return meaning_in(kRemedies, row, value);
}

}  // namespace espalier
