#include "espalier/loop/reward.h"

#include <algorithm>
#include <filesystem>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/loop/python_process.h"

namespace espalier {
namespace {

// Imports argv[1], then answers {"arguments": {...}} with {"score": x} or {"error": text}. The function's own output
// goes to stderr: standard output belongs to the answers.
constexpr const char* kDriver = R"python(
import importlib.util, json, math, os, sys, traceback
path = os.path.abspath(sys.argv[1])
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def described(error):
    places = [p for p in traceback.extract_tb(error.__traceback__) if p.filename == path]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else places[-1].lineno if places else None
    return f"{type(error).__name__}: {error}" + (f" (line {line})" if line else "")

def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()

def scored(arguments):
    value = compute_score(**arguments)
    if isinstance(value, dict):
        value = value["score"]
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"compute_score returned {value}, which is no finite number")
    return value

compute_score = None
failure = None
try:
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("espalier_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compute_score = module.compute_score
except BaseException as error:
    failure = described(error)
for line in sys.stdin:
    try:
        if failure:
            answer(error=failure)
        else:
            answer(score=scored(json.loads(line)))
    except BaseException as error:
        answer(error=described(error))
)python";

class TaskReward final : public Reward {
 public:
  double of(const Problem& problem, std::span<const std::int32_t> response_ids) override {
    return answer_score(response_ids, problem.answer_ids);
  }
};

class PythonReward final : public Reward {
 public:
  PythonReward(const std::string& file, const std::string& task)
      : file_(file), source_("espalier/" + task), process_(kDriver, file, file) {}

  double of(const Problem& problem, std::span<const std::int32_t> response_ids) override {
    const Vocabulary& words = Vocabulary::built_in();
    const auto end = std::ranges::find(response_ids, words.end());
    Json arguments;
    arguments["data_source"] = source_;
    arguments["solution_str"] = words.text({response_ids.begin(), end});
    arguments["ground_truth"] = words.text(problem.answer_ids);
    arguments["extra_info"] = {{"prompt", words.text(problem.prompt_ids)},
                               {"ended", end != response_ids.end()},
                               {"tokens", response_ids.size()}};
    const Json answer = Json::parse(process_.ask(arguments.dump() + "\n"), nullptr, false);
    if (!answer.is_object() || !(answer.contains("score") || answer.contains("error")))
      throw InputError({file_, "an answer of the Python process", "something else on its standard output", ""});
    if (answer.contains("error"))
      throw InputError({file_, "compute_score(data_source, solution_str, ground_truth, extra_info) to return a number",
                        answer["error"].get<std::string>(),
                        "for the response '" + words.text({response_ids.begin(), end}) + "'"});
    return answer["score"].get<double>();
  }

 private:
  std::string file_, source_;
  PythonProcess process_;
};

}  // namespace

std::unique_ptr<Reward> make_reward(const std::string& file, const std::string& task) {
  if (file.empty()) return std::make_unique<TaskReward>();
  if (!std::filesystem::is_regular_file(file))
    throw InputError({file, "a Python file with compute_score", "no such file", "correct --reward"});
  return std::make_unique<PythonReward>(file, task);
}

}  // namespace espalier
