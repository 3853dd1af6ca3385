#include "espalier/serve/losses.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

using Names = std::vector<std::string_view>;

struct LossRow {
  std::string_view name;
  LossName loss;
  Names required, optional;  // besides target_tokens
  Names config;
  bool wide = false;  // takes K targets a row
};

const std::vector<LossRow>& loss_rows() {
  static const Names kRatio{"logprobs", "advantages"}, kBounds{"clip_low_threshold", "clip_high_threshold"};
  static const std::vector<LossRow> rows = {
      {"cross_entropy", LossName::cross_entropy, {}, {"weights"}, {}, true},
      {"importance_sampling", LossName::importance_sampling, kRatio, {}, {}},
      {"ppo", LossName::ppo, kRatio, kBounds, kBounds},
      {"cispo", LossName::cispo, kRatio, kBounds, kBounds},
      {"dro", LossName::dro, kRatio, {}, {"beta"}},
      {"gspo", LossName::gspo, {"logprobs", "advantages", "sequence_ratio_mask"}, kBounds, kBounds},
  };
  return rows;
}

constexpr std::string_view kTargets = "target_tokens";

std::string listed(const Names& names) {
  std::string out;
  for (const std::string_view name : names) out += (out.empty() ? "" : ", ") + std::string(name);
  return out.empty() ? "none" : out;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (const std::int64_t side : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(side);
  return out + "]";
}

const LossRow& row_of(const std::string& name) {
  for (const LossRow& row : loss_rows())
    if (row.name == name) return row;
  Names names;
  for (const LossRow& row : loss_rows()) names.push_back(row.name);
  if (name == "stable_reinforce")
    throw UnsupportedError({"loss_fn", listed(names), "stable_reinforce, whose formula is not published",
                            "pass loss_fn=\"importance_sampling\" (its closest relative here), or cispo"});
  throw InputError({"loss_fn", "one of " + listed(names), '"' + name + '"', ""});
}

void read_config(const LossRow& row, const LossConfig& config, TrainingCall& call) {
  for (const auto& [name, value] : config) {
    const std::string where = "loss_fn_config[\"" + name + "\"]";
    if (std::ranges::find(row.config, name) == row.config.end())
      throw InputError({where, text_of("only ", listed(row.config), " for ", row.name), "this name", ""});
    const double* number = std::get_if<double>(&value);
    if (number == nullptr || !std::isfinite(*number))
      throw InputError(
          {where, "a finite number", number ? text_of(*number) : '"' + std::get<std::string>(value) + '"', ""});
    (name == "beta" ? call.beta : name == "clip_low_threshold" ? call.low : call.high) = *number;
  }
  if (call.low > call.high)
    throw InputError({"loss_fn_config", "clip_low_threshold at most clip_high_threshold",
                      text_of(call.low, " and ", call.high), "they bound the ratio itself, as 0.8 and 1.2"});
}

// One datum on its way to the engine.
class DatumCheck {
 public:
  DatumCheck(const LossRow& row, const BaseModel& model, std::size_t index, NamedDatum& datum)
      : row_(row), model_(model), index_(index), datum_(datum) {}

  TrainingDatum take() {
    check_tokens();
    check_names();
    const Tensor& targets = datum_.inputs.find(std::string(kTargets))->second;
    for (const auto& [name, tensor] : datum_.inputs) check_input(name, tensor, targets);
    TrainingDatum out;
    out.is_wide = targets.shape.size() == 2;
    out.columns = out.is_wide ? static_cast<std::int32_t>(targets.shape[1]) : 1;
    for (const std::int64_t id : targets.integers) {
      if (id < 0 || id >= model_.vocabulary) refuse(kTargets, ids(), text_of(id));
      out.targets.push_back(static_cast<std::int32_t>(id));
    }
    out.tokens = std::move(datum_.tokens);
    const bool cross_entropy = row_.loss == LossName::cross_entropy;
    out.weight = series(cross_entropy ? "weights" : "advantages");
    if (out.weight.empty()) out.weight.assign(out.targets.size(), 1.0f);
    out.old_logprob = series("logprobs");
    out.in_mean = series("sequence_ratio_mask");
    out.low = series("clip_low_threshold"), out.high = series("clip_high_threshold");
    return out;
  }

 private:
  [[noreturn]] void refuse(std::string_view field, std::string expected, std::string got) const {
    std::string where = text_of("datum ", index_);
    if (!field.empty()) where += text_of(": ", field);
    throw InputError({std::move(where), std::move(expected), std::move(got), ""});
  }
  std::string ids() const { return text_of("token ids in [0, ", model_.vocabulary, ")"); }

  void check_tokens() const {
    const auto count = static_cast<std::int64_t>(datum_.tokens.size());
    if (count == 0) refuse("model_input", "at least one token", "none");
    if (count > model_.context)
      refuse("model_input", text_of("at most ", model_.context, " tokens, the context of ", model_.name),
             text_of(count));
    for (const std::int32_t id : datum_.tokens)
      if (id < 0 || id >= model_.vocabulary) refuse("model_input", ids(), text_of(id));
  }

  void check_names() const {
    Names needed{kTargets};
    needed.insert(needed.end(), row_.required.begin(), row_.required.end());
    for (const std::string_view name : needed)
      if (!datum_.inputs.contains(std::string(name)))
        refuse("loss_fn_inputs", text_of(name, ", which ", row_.name, " needs"), "no such input");
    Names known = needed;
    known.insert(known.end(), row_.optional.begin(), row_.optional.end());
    for (const auto& [name, tensor] : datum_.inputs)
      if (std::ranges::find(known, name) == known.end())
        refuse("loss_fn_inputs", text_of("only ", listed(known), " for ", row_.name), '"' + name + '"');
  }

  void check_input(const std::string& name, const Tensor& tensor, const Tensor& targets) const {
    const bool is_targets = name == kTargets;
    if (tensor.is_integer != is_targets)
      refuse(name, is_targets ? "dtype int64 (or int32)" : "dtype float32 (or bfloat16)",
             tensor.is_integer ? "whole numbers" : "floating-point numbers");
    const std::size_t sides = tensor.shape.size();
    if (sides != 1 && !(sides == 2 && row_.wide))
      refuse(name, row_.wide ? "one or two dimensions" : "one dimension", text_of(sides));
    if (tensor.shape[0] != static_cast<std::int64_t>(datum_.tokens.size()))
      refuse(name, text_of(datum_.tokens.size(), " rows, as many as model_input has tokens"), text_of(tensor.shape[0]));
    if (sides == 2 && tensor.shape[1] == 0) refuse(name, "at least one column", "none");
    if (tensor.shape != targets.shape)
      refuse(name, text_of("the shape of target_tokens, ", shape_text(targets.shape)), shape_text(tensor.shape));
    for (std::size_t i = 0; i < tensor.floats.size(); ++i)
      if (!std::isfinite(tensor.floats[i]))
        refuse(text_of(name, "[", i, "]"), "a finite number", text_of(tensor.floats[i]));
  }

  std::vector<float> series(const std::string& name) {
    const auto found = datum_.inputs.find(name);
    return found == datum_.inputs.end() ? std::vector<float>() : std::move(found->second.floats);
  }

  const LossRow& row_;
  const BaseModel& model_;
  std::size_t index_;
  NamedDatum& datum_;
};

void check_bounds(const TrainingCall& call, const TrainingDatum& datum, std::size_t index) {
  if (datum.low.empty() && datum.high.empty()) return;
  for (std::size_t i = 0; i < datum.targets.size(); ++i) {
    const double low = datum.low.empty() ? call.low : datum.low[i],
                 high = datum.high.empty() ? call.high : datum.high[i];
    if (low > high)
      throw InputError({text_of("datum ", index, ": clip_low_threshold[", i, "]"), "at most clip_high_threshold",
                        text_of(low, " and ", high), "they bound the ratio itself, as 0.8 and 1.2"});
  }
}

}  // namespace

TrainingCall training_call(const std::string& loss, const LossConfig& config, bool backward,
                           std::vector<NamedDatum> data, const BaseModel& model) {
  const LossRow& row = row_of(loss);
  TrainingCall call;
  call.loss = row.loss;
  call.backward = backward;
  read_config(row, config, call);
  if (data.empty()) throw InputError({"data", "at least one datum", "none", ""});
  for (std::size_t i = 0; i < data.size(); ++i) {
    call.data.push_back(DatumCheck(row, model, i, data[i]).take());
    check_bounds(call, call.data.back(), i);
  }
  return call;
}

}  // namespace espalier::serve
