#include "espalier/loop/teacher.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "espalier/base/error.h"
#include "espalier/config/model_config.h"

namespace espalier {
namespace {

std::string bytes_of_tokenizer(const std::filesystem::path& directory) {
  std::ifstream file(directory / "tokenizer.json", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::optional<ModelShape> teacher_shape(const Options& options) {
  if (options.opd_kl_coef != 0 && options.teacher_model.empty())
    throw OptionError({"--teacher-model", "the directory of the model that scores responses, for --opd-kl-coef",
                       "nothing", "give --teacher-model DIR, or leave --opd-kl-coef out"});
  if (options.opd_kl_coef == 0 && !options.teacher_model.empty())
    throw OptionError({"--teacher-model", "--opd-kl-coef above 0 beside it", options.teacher_model,
                       "give --opd-kl-coef, or leave --teacher-model out"});
  if (options.teacher_model.empty()) return {};
  return read_model_shape(options.teacher_model);
}

void note_teacher(const Options& options, const ModelShape& policy, Progress& progress) {
  const std::optional<ModelShape> teacher = teacher_shape(options);
  if (!teacher) return;
  if (teacher->vocabulary < policy.vocabulary)
    progress.note(text_of("--teacher-model has ", teacher->vocabulary, " tokens, the policy ", policy.vocabulary,
                          ": the run ends where the policy samples one that the teacher lacks"));
  if (options.model.empty()) return;
  const std::string own = bytes_of_tokenizer(options.model), other = bytes_of_tokenizer(options.teacher_model);
  if (!own.empty() && !other.empty() && own != other)
    progress.note(text_of("tokenizer.json of --teacher-model ", options.teacher_model, " is not that of --model ",
                          options.model, ": a token has to mean the same to both"));
}

void require_tokens(const ModelShape& teacher, const Options& options, std::span<const Rollout> rollouts) {
  std::int32_t largest = -1;
  for (const Rollout& rollout : rollouts)
    for (std::int32_t depth = 0; depth < rollout.length(); ++depth)
      largest = std::max(largest, rollout.token_at(depth));
  if (largest >= teacher.vocabulary)
    throw InputError({options.teacher_model, text_of("a teacher with the tokens of --model, up to ", largest),
                      text_of(teacher.vocabulary, " tokens"), "give a teacher with the same vocabulary"});
}

}  // namespace espalier
