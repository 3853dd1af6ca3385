#include "espalier/loop/questions.h"

#include <utility>

#include "espalier/base/error.h"
#include "espalier/generate/generate_records.h"
#include "espalier/loop/built_in_tasks.h"
#include "espalier/loop/file_questions.h"

namespace espalier {

namespace {

std::unique_ptr<Questions> questions_of(const Options& options, const BuiltInTasks& tasks,
                                        const std::filesystem::path& source, const ModelShape& shape,
                                        Progress& progress) {
  if (options.prompts.empty()) {
    if (!options.stop_ids.empty())
      throw OptionError({"--stop-ids", "no stop tokens for a built-in task, because its answers end with <end>",
                         options.stop_ids, "leave it out"});
    for (const auto& [name, value] :
         {std::pair("--stop", options.stop), std::pair("--chat-template-kwargs", options.chat_template_kwargs)})
      if (!value.empty())
        throw OptionError(
            {name, "no such option for a built-in task, which has its own prompts and answers", value, "leave it out"});
    return tasks.questions(options);
  }
  if (options.model.empty())
    throw OptionError({"--model", "a model with weights and tokenizer for --prompts", "nothing",
                       "give --model DIR, or leave --prompts out for a built-in task"});
  if (!has_weights(source))
    throw InputError({source.string(), "a model with weights, for --prompts", "none (only tasks have a warm start)",
                      "give a trained --model"});
  if (options.reward.empty() && options.env.empty() && options.teacher_model.empty())
    throw OptionError({"--reward", "a Python file with compute_score, which scores the answers to --prompts", "nothing",
                       "give --reward FILE.py (docs/rewards.md), --env FILE.py (docs/agents.md), or a teacher "
                       "(--teacher-model, --opd-kl-coef)"});
  if (options.val_prompts.empty() && options.expect_accuracy > 0)
    throw OptionError(
        {"--expect-accuracy", "--val-prompts, the prompts of the evaluation", "none", "give --val-prompts FILE"});
  return std::make_unique<FileQuestions>(options, source, shape, progress);
}

}  // namespace

bool has_weights(const std::filesystem::path& directory) {
  std::error_code failure;
  for (std::filesystem::directory_iterator entry(directory, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string ending = entry->path().extension().string();
    if (ending == ".safetensors" || ending == ".bin" || ending == ".pt" || ending == ".pth") return true;
  }
  return false;
}

std::unique_ptr<Questions> make_questions(const Options& options, const BuiltInTasks& tasks,
                                          const std::filesystem::path& source, const ModelShape& shape,
                                          Progress& progress) {
  check_environment(options);
  std::unique_ptr<Questions> out = questions_of(options, tasks, source, shape, progress);
  if (!options.env.empty()) out->set_environment(std::make_unique<Environment>(options.env, options.reward_timeout));
  return out;
}

}  // namespace espalier
