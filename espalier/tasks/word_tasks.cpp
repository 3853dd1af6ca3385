#include "espalier/tasks/word_tasks.h"

#include "espalier/tasks/fresh_model.h"
#include "espalier/tasks/model_words.h"
#include "espalier/tasks/task_questions.h"
#include "espalier/tasks/warm_start.h"

namespace espalier {
namespace {

class WordTasks final : public BuiltInTasks {
 public:
  std::unique_ptr<Questions> questions(const Options& options) const override {
    return std::make_unique<TaskQuestions>(options);
  }
  void check_words(const std::filesystem::path& model, const ModelShape& shape) const override {
    espalier::check_words(model, shape);
  }
  Json fresh_config(const Options& options) const override {
    return espalier::fresh_config(options.fresh, options.prompt_length + options.max_response_length);
  }
  void write_fresh_model(const std::filesystem::path& directory, const Json& config) const override {
    espalier::write_fresh_model(directory, config);
  }
  std::unique_ptr<WarmStart> warm_start(ModelState& model, const Options& options,
                                        const MachineProfile& machine) const override {
    return std::make_unique<TaskWarmStart>(model, task_of(options), options, machine);
  }
};

}  // namespace

const BuiltInTasks& word_tasks() {
  static const WordTasks tasks;
  return tasks;
}

}  // namespace espalier
