// `grpo`: a line every ten batches for a person, evaluations and sample answers between them; steps and evaluations for
// a program.
#include "espalier/loop/grpo.h"

#include <cmath>
#include <iomanip>
#include <map>
#include <optional>
#include <utility>

#include "cli/verbs.h"
#include "espalier/base/units.h"
#include "espalier/metrics/timer.h"
#include "espalier/report/plan_picture.h"
#include "espalier/services/tracker.h"
#include "espalier/tasks/word_tasks.h"

namespace espalier::cli {
namespace {

constexpr int kVerificationFailed = 6;

// The start of the character that the byte at `place` is part of, or the text's end.
std::size_t character_at(const std::string& text, std::size_t place) {
  while (place < text.size() && (text[place] & 0xc0) == 0x80) ++place;
  return place;
}

// "amber teal ; ... ; ? otter": the two ends of a long prompt on one line, cut between words where there are some.
std::string shortened(const std::string& text) {
  constexpr std::size_t kHead = 40, kTail = 60;
  std::string line;
  for (const char c : text) line += c == '\n' ? "\\n" : std::string(1, c);
  if (line.size() <= kHead + kTail + 5) return line;
  std::size_t head = line.rfind(' ', kHead), tail = line.find(' ', line.size() - kTail);
  if (head == std::string::npos) head = character_at(line, kHead);
  if (tail == std::string::npos) tail = character_at(line, line.size() - kTail);
  return line.substr(0, head) + " ..." + line.substr(tail);
}

// Gathers the steps of some batches into one line, and prints what else a run says.
class RunText {
 public:
  // `every`: batches from one line to the next.
  RunText(std::ostream& out, std::int64_t show, std::int64_t every) : out_(out), show_(show), every_(every) {}

  void print(const Json& line) {
    const std::string kind = line["kind"];
    if (kind == "warm_start") print_warm_start(line);
    if (kind == "step") print_step(line);
    if (kind == "evaluation") print_evaluation(line);
    if (kind == "sample") print_sample(line);
    out_.flush();  // seen at once, also through a pipe
  }

 private:
  void print_warm_start(const Json& line) {
    warm_start_steps_ = line["step"];
    if (warm_start_steps_ % 100 != 0) return;
    out_ << "warm start " << std::setw(5) << warm_start_steps_ << "  prompts of "
         << line["prompt_length"].get<std::int64_t>() << " tokens  loss " << std::fixed << std::setprecision(3)
         << line["loss"].get<double>() << std::defaultfloat << "  right " << format_percent(line["right"].get<double>())
         << "  held out, full length " << format_percent(line["held_out"].get<double>()) << '\n';
  }

  // A line for the first and every --logging-freq-th batch, and for any after kSeconds without one: means over the
  // batches since the last line.
  void print_step(const Json& line) {
    constexpr double kSeconds = 10;
    ++steps_;
    for (const char* field : {"kl_loss", "entropy", "clip_fraction"}) sums_[field] += line[field].get<double>();
    if (line.contains("teacher_kl")) sums_["teacher_kl"] += line["teacher_kl"].get<double>();
    for (const char* part : {"generate", "score", "update"}) batch_sums_[part] += line["seconds"][part].get<double>();
    for (const char* rows : {"physical", "logical"}) rows_[rows] += line["rows"][rows].get<std::int64_t>();
    if (line["steps_left"].get<std::int64_t>() > 0) return;
    ++batches_;
    for (const char* field : {"reward", "accuracy"}) batch_sums_[field] += line[field].get<double>();
    if (line.contains("turns")) batch_sums_["turns"] += line["turns"].get<double>();
    batch_sums_["length"] += line["length"]["mean"].get<double>();
    dropped_ += line["groups_dropped"].get<std::int64_t>();
    const std::int64_t batch = line["batch"];
    if (batch != 1 && batch % every_ != 0 && since_line_.total() < kSeconds) return;
    print_line(line["step"], line["steps_total"]);
    steps_ = batches_ = dropped_ = 0, sums_.clear(), batch_sums_.clear(), rows_.clear();
    since_line_ = Timer();
  }

  void print_line(std::int64_t step, std::int64_t steps) {
    const auto of_step = [&](const char* field) { return sums_[field] / static_cast<double>(steps_); };
    const auto of_batch = [&](const char* field) { return batch_sums_[field] / static_cast<double>(batches_); };
    out_ << "step " << std::setw(4) << step << " of " << steps << std::fixed << std::setprecision(3) << "  reward "
         << of_batch("reward") << "  right " << std::setw(6) << format_percent(of_batch("accuracy")) << "  kl "
         << of_step("kl_loss");
    if (sums_.contains("teacher_kl")) out_ << "  teacher kl " << of_step("teacher_kl");
    out_ << "  entropy " << of_step("entropy") << "  clipped " << format_percent(of_step("clip_fraction"))
         << std::setprecision(1) << "  length " << of_batch("length");
    if (batch_sums_.contains("turns")) out_ << "  turns " << of_batch("turns");
    if (dropped_ > 0) out_ << "  dropped " << dropped_;
    out_ << std::setprecision(2) << "  generate " << of_batch("generate") << " score " << of_batch("score")
         << " update " << of_batch("update") << " s  tokens computed " << format_count(rows_["physical"]) << " of "
         << format_count(rows_["logical"]) << std::defaultfloat << '\n';
  }

  void print_evaluation(const Json& line) {
    if (const std::int64_t steps = std::exchange(warm_start_steps_, 0); steps > 0)
      out_ << "warm start ended after " << steps << " steps\n";
    out_ << "==== held out, after step " << line["step"].get<std::int64_t>() << ":  "
         << format_percent(line["accuracy"].get<double>()) << " right, reward " << std::fixed << std::setprecision(3)
         << line["reward"].get<double>() << std::defaultfloat << " ====\n";
  }

  void print_sample(const Json& line) {
    if (const std::int64_t step = line["step"]; std::exchange(shown_at_, step) != step) shown_ = 0;
    if (shown_++ >= show_) return;
    out_ << "  asked     " << shortened(line["prompt"]) << "\n  answered  " << shortened(line["response"])
         << "\n  expected  " << shortened(line["expected"]) << "\n";
  }

  std::ostream& out_;
  std::int64_t show_, every_, shown_ = 0, shown_at_ = -1, warm_start_steps_ = 0;
  std::int64_t steps_ = 0, batches_ = 0, dropped_ = 0;  // since the last line, as all below
  std::map<std::string, double> sums_, batch_sums_;     // over steps, over batches
  std::map<std::string, std::int64_t> rows_;
  Timer since_line_;
};

Json without_kind(const Json& line) {
  Json out = line;
  out.erase("kind");
  return out;
}

}  // namespace

int run_grpo(Context& context) {
  RunText text(context.text, context.options.show, context.options.logging_freq);
  std::optional<Tracker> tracker;
  if (ReportTargets::from(context.options).wandb && context.mesh.writes())
    tracker.emplace(context.options, 'l', context.progress);
  context.result["steps"] = Json::array();
  context.result["evaluations"] = Json::array();
  const auto on_line = [&](const Json& line) {
    context.progress.end();  // takes the bar away; the next report draws it again
    text.print(line);
    if (tracker) tracker->write(line);
    if (line["kind"] == "step") context.result["steps"].push_back(without_kind(line));
    if (line["kind"] == "evaluation") context.result["evaluations"].push_back(without_kind(line));
  };
  const GrpoReport report =
      grpo(context.options, {word_tasks(), plan_picture}, context.progress, on_line, context.mesh);
  if (tracker) tracker->finish();
  const std::string run = report.run.string();
  context.result["run"] = run;
  context.result["steps_done"] = report.steps;
  context.result["accuracy"] = report.accuracy ? Json(*report.accuracy) : Json();
  context.text << "after " << report.steps << " steps: ";
  if (report.accuracy)
    context.text << format_percent(*report.accuracy) << " of the held-out prompts answered right";
  else
    context.text << "nothing was held out (--val-prompts)";
  context.text << "\nwritten: " << run << "\n";
  const bool learned = !report.accuracy || *report.accuracy >= context.options.expect_accuracy;
  context.result["learned"] = learned;
  context.result["nothing_left"] = report.nothing_left;
  if (learned) return 0;
  context.text << "NOT LEARNED: --expect-accuracy asks for " << format_percent(context.options.expect_accuracy) << "\n";
  return kVerificationFailed;
}

}  // namespace espalier::cli
