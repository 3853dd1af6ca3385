// The C interface of the torch-free core: copies buffers in, hands tables out, turns exceptions into JSON.
#include "espalier/binding/core_interface.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/binding/guarded.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/plan/planner.h"
#include "espalier/program/causal_runs.h"
#include "espalier/program/program.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/settings/option_help.h"
#include "espalier/settings/trl_names.h"

using namespace espalier;  // NOLINT: the interface's own names are the C ones

struct espalier_plan {
  std::vector<Rollout> batch;
  StepPlan plan;
  std::vector<std::pair<const PlanItem*, std::int32_t>> items;  // with their parents
  std::vector<std::int32_t> table;
  std::string text;
};

namespace {

thread_local std::string last_error;

std::vector<Rollout> batch_of(const espalier_rollouts& in) {
  std::vector<Rollout> batch(static_cast<std::size_t>(in.rollouts));
  for (std::int64_t i = 0; i < in.rollouts; ++i) {
    Rollout& rollout = batch[static_cast<std::size_t>(i)];
    rollout.where = text_of("rollout ", i);
    rollout.index = i;
    const std::int64_t length = in.starts[i + 1] - in.starts[i], prompt = in.prompt_lengths[i];
    if (prompt < 1) throw InputError({rollout.where, "at least one prompt token", text_of(prompt), ""});
    if (length < prompt || length > INT32_MAX)
      throw InputError({rollout.where, "at least as many tokens as prompt tokens", text_of(length, " tokens"), ""});
    const std::int32_t* tokens = in.tokens + in.starts[i];
    rollout.prompt_ids.assign(tokens, tokens + prompt);
    rollout.response_ids.assign(tokens + prompt, tokens + length);
    for (std::int64_t at = 0; at < length; ++at)
      if (tokens[at] < 0) throw InputError({rollout.where, "token ids from 0", text_of(tokens[at], " at ", at), ""});
    rollout.loss_mask.assign(rollout.response_ids.size(), 1);
  }
  return batch;
}

ModelShape shape_of(const espalier_shape& in) {
  for (const std::int64_t size : {in.layers, in.hidden, in.heads, in.kv_heads, in.head_dim, in.vocabulary})
    if (size < 1) throw InputError({"the model's shape", "sizes of at least 1", text_of(size), ""});
  ModelShape shape;
  AttentionShape attention;
  attention.heads = in.heads;
  attention.kv_heads = in.kv_heads;
  attention.head_dim = in.head_dim;
  shape.hidden = in.hidden;
  shape.layer = attention_layers(in.layers, attention, in.inner, in.experts > 0 ? MlpKind::experts : MlpKind::dense);
  shape.vocabulary = in.vocabulary;
  shape.experts = in.experts;
  shape.experts_per_token = in.experts > 0 ? in.experts_per_token : 0;
  shape.expert_inner = in.expert_inner;
  return shape;
}

void number(const std::vector<PlanItem>& items, std::int32_t parent,
            std::vector<std::pair<const PlanItem*, std::int32_t>>& out) {
  for (const PlanItem& item : items) {
    const auto own = static_cast<std::int32_t>(out.size());
    out.emplace_back(&item, parent);
    number(item.below, own, out);
  }
}

espalier_plan* planned(const espalier_rollouts& rollouts, const espalier_shape& shape,
                       const espalier_plan_request& request) {
  Options options;
  set_option(options, "schedule", request.schedule);
  set_option(options, "share", request.share);
  set_option(options, "trunk-state", request.trunk_state);
  set_option(options, "dtype", request.dtype);
  set_option(options, "token-budget", std::to_string(request.wave_tokens));
  if (options.trunk_state == SavedState::offload)
    throw UnsupportedError(
        {"trunk_state", "auto, keep or recompute", "'offload'", "A model in Python keeps its own activations"});
  options.wave_state = SavedState::keep, options.path_state = PathState::keep;
  PlanOptions plan_options = plan_options_of(options);
  plan_options.all_logprobs = true;
  plan_options.kind.gradients = request.gradients != 0;
  auto out = std::make_unique<espalier_plan>();
  out->batch = batch_of(rollouts);
  const auto trees = build_prefix_trees(out->batch, options.share);
  auto profile = default_profile(request.device, plan_options.dtype, static_cast<int>(request.threads));
  if (request.seconds_per_call > 0) profile.seconds_per_call = request.seconds_per_call;
  out->plan = make_plan(out->batch, trees, shape_of(shape), plan_options, profile);
  number(out->plan.items, -1, out->items);
  return out.release();
}

std::int64_t fill_table(espalier_plan& plan, std::int64_t index, const std::string& table, std::int64_t& width) {
  ESPALIER_INTERNAL(index >= 0 && index < static_cast<std::int64_t>(plan.items.size()), "item ", index);
  const auto& [item, parent] = plan.items[static_cast<std::size_t>(index)];
  std::vector<std::int32_t>& out = plan.table;
  out.clear();
  if (table == "item") {
    out = {item->kind == ItemKind::trunk,
           item->state == SavedState::recompute,
           parent,
           item->path_rows,
           item->set.rows,
           item->set.outputs};
    width = 6;
  } else if (table == "segments") {
    for (const RowSegment& s : item->set.segments)
      out.insert(out.end(), {s.rollout, s.begin, s.end, s.row, s.subtree_end, s.multiplicity, s.first, s.last});
    width = 8;
  } else if (table == "runs") {
    std::vector<std::int32_t> subtree_end(static_cast<std::size_t>(item->set.rows));
    for (const RowSegment& s : item->set.segments)
      std::fill_n(subtree_end.begin() + s.row, s.end - s.begin, s.subtree_end);
    for (const CausalRun& run : causal_runs(subtree_end)) out.insert(out.end(), {run.first, run.end, run.below});
    width = 3;
  } else if (table == "edges") {
    for (const LossEdge& edge : edges_of(item->set, plan.batch, true))
      out.insert(out.end(), {edge.row, edge.target, edge.rollout, edge.position});
    width = 4;
  } else {
    ESPALIER_INTERNAL(table == "rollouts" || table == "finished", "table ", table);
    out = table == "rollouts" ? item->set.rollouts : item->finished;
    width = 1;
  }
  return static_cast<std::int64_t>(out.size()) / width;
}

const char* type_name(OptionType type) {
  switch (type) {
    case OptionType::text:
      return "text";
    case OptionType::number:
      return "number";
    case OptionType::integer:
      return "integer";
    case OptionType::flag:
      return "flag";
    case OptionType::list:
      return "list";
    case OptionType::paths:
      return "paths";
  }
  return "";
}

std::string option_table() {
  Json verbs = Json::object(), options = Json::array(), aliases = Json::object();
  for (const VerbName& verb : verb_names()) verbs[verb.name] = std::string(1, verb.letter);
  for (const OptionRow& row : option_rows())
    options.push_back({{"name", row.name},
                       {"section", section_of(row)},
                       {"type", type_name(row.type)},
                       {"default", row.default_text},
                       {"range", row.range},
                       {"unit", row.unit},
                       {"verbs", row.verbs},
                       {"help", row.help}});
  for (const std::string& alias : alias_names()) aliases[alias] = alias_targets(alias);
  return Json{{"verbs", std::move(verbs)}, {"options", std::move(options)}, {"aliases", std::move(aliases)}}.dump();
}

}  // namespace

void espalier::keep_error(const char* kind, int exit_code, const ErrorText& text) {
  const Json error = {{"kind", kind},    {"exit_code", exit_code}, {"where", text.where}, {"expected", text.expected},
                      {"got", text.got}, {"remedy", text.remedy}};
  last_error = error.dump(-1, ' ', false, Json::error_handler_t::replace);
}

const char* espalier_options() {
  static const std::string table = option_table();
  return table.c_str();
}

const char* espalier_last_error() { return last_error.c_str(); }

int32_t espalier_group(const espalier_rollouts* rollouts, int32_t* groups) {
  return guarded(-1, [&] {
    const std::vector<Rollout> batch = batch_of(*rollouts);
    for (const std::int64_t group : group_of(batch)) *groups++ = static_cast<std::int32_t>(group);
    return 0;
  });
}

espalier_plan* espalier_plan_new(const espalier_rollouts* rollouts, const espalier_shape* shape,
                                 const espalier_plan_request* request) {
  return guarded<espalier_plan*>(nullptr, [&] { return planned(*rollouts, *shape, *request); });
}

void espalier_plan_delete(espalier_plan* plan) { delete plan; }

int64_t espalier_plan_items(const espalier_plan* plan) { return static_cast<int64_t>(plan->items.size()); }

int64_t espalier_plan_table(espalier_plan* plan, int64_t item, const char* table, const int32_t** data,
                            int64_t* width) {
  return guarded<int64_t>(-1, [&] {
    const std::int64_t rows = fill_table(*plan, item, table, *width);
    *data = plan->table.data();
    return rows;
  });
}

int64_t espalier_plan_program(espalier_plan* plan, const int32_t** steps) {
  return guarded<int64_t>(-1, [&] {
    std::map<const PlanItem*, std::int32_t> number_of;
    for (const auto& [item, parent] : plan->items) number_of.emplace(item, std::ssize(number_of));
    plan->table.clear();
    for (const Step& step : program_of(plan->plan.items, 1))
      plan->table.insert(plan->table.end(), {step.pass == Pass::forward, number_of.at(step.own)});
    *steps = plan->table.data();
    return std::ssize(plan->table) / 2;
  });
}

int64_t espalier_causal_runs(const int32_t* subtree_end, int64_t rows, int32_t* runs) {
  return guarded<int64_t>(-1, [&] {
    const std::vector<CausalRun> found = causal_runs({subtree_end, static_cast<std::size_t>(rows)});
    for (const CausalRun& run : found) *runs++ = run.first, *runs++ = run.end, *runs++ = run.below;
    return std::ssize(found);
  });
}

const char* espalier_plan_json(espalier_plan* plan) {
  return guarded<const char*>(nullptr, [&] { return (plan->text = to_json(plan->plan).dump()).c_str(); });
}

const char* espalier_plan_text(espalier_plan* plan) {
  return guarded<const char*>(nullptr, [&] { return (plan->text = explain(plan->plan)).c_str(); });
}
