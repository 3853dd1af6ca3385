// seconds = matrix FLOPs / rate(rows) + attention FLOPs / rate + bytes / bandwidth + calls x overhead
#include "espalier/forecast/cost_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/forecast/planned_machine.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

constexpr double kManyRows = MachineProfile::kGradientRows, kHeadRows = MachineProfile::kHeadRows;
// Kernel calls of a layer's forward: a norm and a product around its mixer; norm, products and activation of an MLP.
constexpr int kCallsPerMixer = 2, kCallsPerMlp = 4;
constexpr int kCallsPerExpert = 5;  // rows gathered, two products, activation, sum
// The part of a forward's traffic in rows, and of its calls, that recomputing gate and up repeats: norm and product.
constexpr double kGateUpPass = 0.15;
// Attention multiplies in blocks of 64 rows, and masks half of the block on the diagonal.
constexpr double kMaskedPairs = 32;

// Seconds of an operation at a width of which 1/width is `inverse` on average, over those at the width `wide`.
double slowness(double wide_rate, double narrow_rate, double inverse, double wide, double narrow) {
  if (narrow_rate == 0) return 1;
  const double part = std::max(0.0, (inverse - 1 / wide) / (1 / narrow - 1 / wide));
  return 1 + part * std::max(0.0, wide_rate / narrow_rate - 1);
}

// The mean of 1/columns over the elements of matrices: rows over elements.
struct InverseColumns {
  double rows = 0, elements = 0;

  void add(const ProductShape& product) {
    rows += static_cast<double>(product.outputs()), elements += static_cast<double>(product.weights());
  }
  double mean() const { return elements > 0 ? rows / elements : 0; }
};

}  // namespace

CostParts& CostParts::operator+=(const CostParts& other) {
  products += other.products, attention += other.attention, rows += other.rows, head += other.head;
  return *this;
}

CostParts CostParts::operator*(const CostParts& factors) const {
  return {products * factors.products, attention * factors.attention, rows * factors.rows, head * factors.head};
}

double MachineProfile::matrix_flops_per_second(double rows) const {
  ESPALIER_INTERNAL(!matrix.empty(), "machine profile '", name, "' without matrix rates");
  // Time for one FLOP a row, piecewise linear in rows: below the table as long as its first entry, above it at its
  // last rate.
  const double at = std::max(rows, 1.0);
  const auto time = [](const Rate& rate) { return static_cast<double>(rate.rows) / rate.flops_per_second; };
  if (at <= static_cast<double>(matrix.front().rows)) return at / time(matrix.front());
  for (std::size_t i = 1; i < matrix.size(); ++i) {
    if (at > static_cast<double>(matrix[i].rows)) continue;
    const Rate &low = matrix[i - 1], &high = matrix[i];
    const double part = (at - static_cast<double>(low.rows)) / static_cast<double>(high.rows - low.rows);
    return at / (time(low) + part * (time(high) - time(low)));
  }
  return matrix.back().flops_per_second;
}

std::int64_t MachineProfile::large_rows() const {
  double best = 0;
  for (const Rate& rate : matrix) best = std::max(best, rate.flops_per_second);
  for (const Rate& rate : matrix)
    if (rate.flops_per_second >= 0.95 * best) return rate.rows;
  return 1;
}

std::string MachineProfile::line() const {
  std::string rates, rows;
  for (const Rate& rate : matrix) {
    rates += text_of(rates.empty() ? "" : ", ", std::llround(rate.flops_per_second / 1e9));
    rows += text_of(rows.empty() ? "" : ", ", rate.rows);
  }
  const auto also = [](double narrow, const char* where, double width) {
    return narrow > 0 ? text_of(" (", std::llround(narrow / 1e9), where, std::llround(width), ")") : std::string();
  };
  std::string row_kinds;
  for (const MixerKind kind : kMixerKinds)
    if (const double rate = row_flops_per_second[static_cast<std::size_t>(kind)]; rate > 0)
      row_kinds += text_of("; rows of ", name_of(kind), " ", std::llround(rate / 1e9), " GFLOP/s");
  return text_of(name, " (", source, ", ", name_of(dtype), "): matrix products ", rates, " GFLOP/s at ", rows, " rows",
                 weight_gradient_flops_per_second > 0
                     ? text_of(", gradients of weights ", std::llround(weight_gradient_flops_per_second / 1e9))
                     : "",
                 also(narrow_gradient_flops_per_second, " in matrices of ", kNarrowColumns),
                 head_flops_per_second > 0 ? text_of(", head ", std::llround(head_flops_per_second / 1e9)) : "",
                 "; attention ", std::llround(attention_flops_per_second / 1e9),
                 also(narrow_attention_flops_per_second, " with heads of ", kNarrowHead), " GFLOP/s", row_kinds,
                 "; memory ", std::llround(bytes_per_second / 1e9), " GB/s; ", std::round(seconds_per_call * 1e8) / 100,
                 " us per call; stores at ", std::llround(spill_bytes_per_second / 1e6), " MB/s",
                 fitted_steps > 0 ? text_of("; fitted to ", fitted_steps, " steps") : "");
}

MachineProfile default_profile(Choice<DeviceType> device, DType dtype, int threads) {
  if (device == DeviceType::cuda) return planned_machine("h100", dtype);
  MachineProfile profile;
  profile.dtype = dtype;
  profile.threads = std::max(threads, 1);
  const double width = dtype == DType::float64 ? 0.5 : 1.0;
  const double cores = profile.threads, peak = 60e9 * width * cores;
  profile.name = text_of("a CPU, ", static_cast<int>(cores), cores == 1 ? " thread" : " threads");
  profile.matrix = {{1, peak / 40},    {16, peak / 4},      {64, peak / 2},
                    {256, peak * 0.8}, {1024, peak * 0.95}, {2048, peak}};
  profile.attention_flops_per_second = 0.6 * peak;
  profile.bytes_per_second = std::min(6e9 * cores, 100e9);
  profile.seconds_per_call = 5e-6;
  return profile;
}

namespace {

// The measured rates, by name.
Json row_rates(const MachineProfile& profile) {
  Json rates = Json::object();
  for (const MixerKind kind : kMixerKinds)
    if (const double rate = profile.row_flops_per_second[static_cast<std::size_t>(kind)]; rate > 0)
      rates[std::string(name_of(kind))] = rate;
  return rates;
}

}  // namespace

Json to_json(const MachineProfile& profile) {
  Json matrix = Json::array();
  for (const MachineProfile::Rate& rate : profile.matrix)
    matrix.push_back({{"rows", rate.rows}, {"flops_per_second", rate.flops_per_second}});
  return {{"name", profile.name},
          {"source", profile.source},
          {"device", profile.device},
          {"dtype", name_of(profile.dtype)},
          {"threads", profile.threads},
          {"matrix", matrix},
          {"weight_gradient_flops_per_second", profile.weight_gradient_flops_per_second},
          {"head_flops_per_second", profile.head_flops_per_second},
          {"attention_flops_per_second", profile.attention_flops_per_second},
          {"narrow_gradient_flops_per_second", profile.narrow_gradient_flops_per_second},
          {"narrow_attention_flops_per_second", profile.narrow_attention_flops_per_second},
          {"row_flops_per_second", row_rates(profile)},
          {"attention_kernels", name_of(profile.attention_kernels)},
          {"bytes_per_second", profile.bytes_per_second},
          {"seconds_per_call", profile.seconds_per_call},
          {"spill_bytes_per_second", profile.spill_bytes_per_second},
          {"memory_bytes", profile.memory_bytes},
          {"ranks_per_machine", profile.ranks_per_machine},
          {"link_bytes_per_second", profile.link_bytes_per_second},
          {"network_bytes_per_second", profile.network_bytes_per_second},
          {"fit",
           {{"products", profile.fit.products},
            {"attention", profile.fit.attention},
            {"rows", profile.fit.rows},
            {"head", profile.fit.head},
            {"steps", profile.fitted_steps}}}};
}

MachineProfile profile_of(const Json& json, const std::string& where) {
  const auto fail = [&where](const std::string& expected) {
    throw InputError({where, expected, "another value",
                      "docs/machines.md describes profiles; espalier stores its own in ~/.cache/espalier"});
  };
  const auto number = [&](const Json& object, const char* member) {
    if (!object.is_object() || !object.contains(member) || !object.at(member).is_number() ||
        !(object.at(member).get<double>() > 0) || !std::isfinite(object.at(member).get<double>()))
      fail(text_of("a number above 0 as '", member, "'"));
    return object.at(member).get<double>();
  };
  const auto text = [&](const char* member) {
    if (!json.is_object() || !json.contains(member) || !json.at(member).is_string())
      fail(text_of("a string as '", member, "'"));
    return json.at(member).get<std::string>();
  };
  MachineProfile profile;
  profile.name = text("name");
  profile.source = text("source");
  profile.dtype = parse_dtype(text("dtype"));
  profile.attention_flops_per_second = number(json, "attention_flops_per_second");
  profile.bytes_per_second = number(json, "bytes_per_second");
  profile.seconds_per_call = number(json, "seconds_per_call");
  for (const auto& [member, rate] :
       {std::pair("weight_gradient_flops_per_second", &profile.weight_gradient_flops_per_second),
        {"head_flops_per_second", &profile.head_flops_per_second},
        {"narrow_gradient_flops_per_second", &profile.narrow_gradient_flops_per_second},
        {"narrow_attention_flops_per_second", &profile.narrow_attention_flops_per_second}})
    if (json.contains(member) && json.at(member) != Json(0.0)) *rate = number(json, member);
  if (json.contains("row_flops_per_second")) {
    const Json& rates = json.at("row_flops_per_second");
    if (!rates.is_object()) fail("an object as 'row_flops_per_second'");
    for (const auto& [name, rate] : rates.items()) {
      const auto kind = std::ranges::find(kMixerKinds, name, [](MixerKind of) { return name_of(of); });
      if (kind == kMixerKinds.end()) fail(text_of("a kind of mixers in 'row_flops_per_second', not '", name, "'"));
      profile.row_flops_per_second[static_cast<std::size_t>(*kind)] = number(rates, name.c_str());
    }
  }
  if (json.contains("spill_bytes_per_second")) profile.spill_bytes_per_second = number(json, "spill_bytes_per_second");
  if (json.contains("ranks_per_machine"))
    profile.ranks_per_machine = static_cast<std::int64_t>(number(json, "ranks_per_machine"));
  if (json.contains("link_bytes_per_second")) profile.link_bytes_per_second = number(json, "link_bytes_per_second");
  if (json.contains("network_bytes_per_second"))
    profile.network_bytes_per_second = number(json, "network_bytes_per_second");
  if (json.contains("threads")) profile.threads = static_cast<int>(number(json, "threads"));
  if (json.contains("attention_kernels")) {
    const auto words = words_of(AttentionKernels{});
    const auto found = std::ranges::find(words, text("attention_kernels"));
    if (found == words.end() || found == words.begin()) fail(joined(words.subspan(1)) + " as 'attention_kernels'");
    profile.attention_kernels = static_cast<AttentionKernels>(found - words.begin());
  }
  if (json.contains("device")) profile.device = text("device");
  if (profile.device != "cpu" && profile.device != "cuda") fail("cpu or cuda as 'device'");
  if (json.contains("memory_bytes") && json.at("memory_bytes") != Json(0))
    profile.memory_bytes = static_cast<std::int64_t>(number(json, "memory_bytes"));
  if (json.contains("fit")) {
    const Json& fit = json.at("fit");
    profile.fit = {number(fit, "products"), number(fit, "attention"), number(fit, "rows"), number(fit, "head")};
    if (!fit.contains("steps") || !fit.at("steps").is_number_integer() || fit.at("steps") < 0)
      fail("a count as 'steps'");
    profile.fitted_steps = fit.at("steps").get<std::int64_t>();
  }
  if (!json.contains("matrix") || !json.at("matrix").is_array() || json.at("matrix").empty())
    fail("a list as 'matrix'");
  for (const Json& entry : json.at("matrix")) {
    const double rows = number(entry, "rows");
    if (rows > 1e9 || (!profile.matrix.empty() && rows <= static_cast<double>(profile.matrix.back().rows)))
      fail("ascending 'rows' in 'matrix'");
    profile.matrix.push_back({static_cast<std::int64_t>(rows), number(entry, "flops_per_second")});
  }
  return profile;
}

CostModel::CostModel(const LocalShape& local, const MachineProfile& profile, DType dtype, const StepKind& kind,
                     const StepSetting& setting)
    : shape_(local.own()),
      experts_(static_cast<double>(local.experts().size())),
      expert_share_(1),
      row_sets_(1),
      has_head_(local.is_last_stage()),
      profile_(profile),
      kind_(kind),
      bytes_(local, dtype, kind, setting),
      has_windows_(shape_.window() > 0),
      expert_layers_(static_cast<double>(shape_.expert_layers())) {
  const ModelShape& shape = shape_;
  if (const Degrees& degrees = local.degrees(); degrees.ep > 1) {
    expert_share_ = 1 / static_cast<double>(degrees.tp);
    row_sets_ = static_cast<double>(degrees.ep) * expert_share_;
  }
  kept_ = unit_flops(SavedState::keep);
  mlp_again_ = unit_flops(ItemState(kKeep, kKeep, kRecompute));
  all_again_ = unit_flops(SavedState::recompute);
  const double b = static_cast<double>(bytes_of(dtype)), a = dtype == DType::float64 ? 8 : 4;
  const double all_layers = static_cast<double>(shape.layers());
  // A norm and a sum with the stream read and write a row each, around the mixer and around the MLP. An activation
  // reads gate and up and writes one. Each of a row's k experts copies the row, and adds its result to a sum.
  const double k = static_cast<double>(shape.experts_per_token), M = static_cast<double>(shape.hidden);
  double numbers = 0, all_row_flops = 0;
  for (const LayerShape& layer : shape.layer) {
    const MixerTraffic mixer = layer.mixer->traffic();
    numbers += 4 * M + mixer.numbers + (layer.mlp == MlpKind::none ? 0 : 4 * M);
    if (layer.mlp == MlpKind::dense) numbers += 3 * static_cast<double>(layer.inner);
    const double row_flops = layer.mixer->flops().row;
    all_row_flops += row_flops;
    seconds_per_row_flop_ += row_flops / profile.row_rate(layer.mixer->kind());
    calls_ += kCallsPerMixer + mixer.calls + (layer.mlp == MlpKind::none ? 0 : kCallsPerMlp);
  }
  if (all_row_flops > 0) seconds_per_row_flop_ /= all_row_flops;
  bytes_per_row_ = b * numbers + expert_share_ * expert_layers_ * k *
                                     (b * (3.0 * static_cast<double>(shape.expert_inner) + 3 * M) + 2 * a * M);
  // Softmax, entropy and their gradient go over the logits a few times, two of them through exp: worth eight passes.
  logit_bytes_ = 8 * a * static_cast<double>(shape.head_width()) * (kind.gradients ? 1 : 0.5);
  const double head = static_cast<double>(shape.head_width() * shape.hidden);
  const double embedding = static_cast<double>(outer_parameters(shape).embedding.weights());
  std::int64_t expert_parameters = 0;
  for (const LayerShape& layer : shape.layer)
    if (layer.has_experts())
      expert_parameters += layer_parameters(shape, layer).mlp.sum(ProductRows::chosen, [](const ProductShape& product) {
        return product.parameters();
      });
  expert_gradient_bytes_ = 2 * a * static_cast<double>(shape.experts * expert_parameters);
  gradient_bytes_ = 2 * a * (static_cast<double>(shape.parameters()) - embedding - (shape.tied_head ? 0 : head)) -
                    expert_gradient_bytes_;
  if (!shape.trained.all()) {
    const TrainedWeights trained = trained_weights(shape);
    gradient_bytes_ = 2 * a * static_cast<double>(trained.layers);
    expert_gradient_bytes_ = 2 * a * static_cast<double>(trained.experts);
  }
  if (shape.experts > 0) expert_gradient_bytes_ *= experts_ / static_cast<double>(shape.experts);
  head_gradient_bytes_ = shape.trained.head ? 2 * a * head : 0;
  backward_share_ = static_cast<double>(shape.layers() - shape.trained.first_layer) / all_layers;
  compare_widths();
}

void CostModel::compare_widths() {
  const double wide = profile_.weight_gradient_flops_per_second > 0 ? profile_.weight_gradient_flops_per_second
                                                                    : profile_.matrix_flops_per_second(kManyRows);
  const auto of_gradients = [&](double inverse) {
    return slowness(wide, profile_.narrow_gradient_flops_per_second, inverse, MachineProfile::kWideColumns,
                    MachineProfile::kNarrowColumns);
  };
  InverseColumns of_layers, of_experts;
  for (const LayerShape& layer : shape_.layer) {
    const LayerParameters p = layer_parameters(shape_, layer);
    for (const PartParameters* const part : {&p.mixer, &p.mlp})
      for (const ProductShape& product : part->products())
        (product.rows == ProductRows::chosen ? of_experts : of_layers).add(product);
  }
  narrow_layers_ = of_gradients(of_layers.mean());
  narrow_experts_ = of_gradients(of_experts.mean());
  double channels = 0;  // of a head's key and value, in the first layer of attention
  for (std::size_t i = 0; i < shape_.layer.size() && channels == 0; ++i)
    for (const PathKind& kind : shape_.layer[i].mixer->path_kinds(false))
      channels += static_cast<double>(kind.width / kind.heads);
  narrow_heads_ = slowness(profile_.attention_flops_per_second, profile_.narrow_attention_flops_per_second,
                           channels > 0 ? 2 / channels : 0, MachineProfile::kWideHead, MachineProfile::kNarrowHead);
}

CostModel::UnitFlops CostModel::unit_flops(ItemState state) const {
  const auto of = [&](const Work& work) {
    Flops flops = step_flops(shape_, work, kind_, state);
    flops.experts *= expert_share_;
    if (!has_head_) flops.head = 0;
    return flops;
  };
  return {of({.rows = 1}),         of({.pairs = 1}),        of({.outputs = 1}),
          of({.output_pairs = 1}), of({.window_pairs = 1}), of({.window_output_pairs = 1})};
}

const CostModel::UnitFlops& CostModel::unit_of(ItemState state) const {
  return state.recomputes_attention() ? all_again_ : state.recomputes_mlp() ? mlp_again_ : kept_;
}

Flops CostModel::all_flops(const Work& work, ItemState state) const {
  const UnitFlops& unit = unit_of(state);
  Flops flops;
  const auto add = [&](const Flops& one, std::int64_t count) { flops += one * static_cast<double>(count); };
  add(unit.row, work.rows), add(unit.pair, work.pairs);
  add(unit.output, work.outputs), add(unit.output_pair, work.output_pairs);
  if (!has_windows_) return flops;
  add(unit.window_pair, work.window_pairs), add(unit.window_output_pair, work.window_output_pairs);
  return flops;
}

double CostModel::rows_per_expert(std::int64_t rows) const {
  return shape_.experts == 0
             ? 0
             : row_sets_ * static_cast<double>(rows * shape_.experts_per_token) / static_cast<double>(shape_.experts);
}

double CostModel::product_seconds(double flops, double rows, double gradients, double narrow) const {
  if (flops == 0) return 0;
  const double rate = profile_.matrix_flops_per_second(rows);
  const double slower = profile_.weight_gradient_flops_per_second == 0
                            ? 1
                            : profile_.matrix_flops_per_second(kManyRows) / profile_.weight_gradient_flops_per_second;
  return flops / rate * (1 - gradients + gradients * std::max(1.0, slower) * narrow);
}

double CostModel::head_seconds(double flops, std::int64_t outputs) const {
  const auto rows = static_cast<double>(bytes_.head_block_rows(outputs));
  const double rate = profile_.matrix_flops_per_second(rows);
  if (profile_.head_flops_per_second == 0) return flops / rate;
  return flops / rate * profile_.matrix_flops_per_second(kHeadRows) / profile_.head_flops_per_second;
}

double CostModel::attention_seconds(const Flops& flops, const Work& work, ItemState state) const {
  const UnitFlops& unit = unit_of(state);
  const double masked =
      kMaskedPairs *
      (static_cast<double>(work.rows) * (unit.pair.attention + unit.window_pair.attention) +
       static_cast<double>(work.outputs) * (unit.output_pair.attention + unit.window_output_pair.attention));
  return (flops.attention + masked) * narrow_heads_ / profile_.attention_flops_per_second +
         flops.states * seconds_per_row_flop_;
}

// A backward pass moves twice the bytes of a forward; `passes` counts in forwards.
CostParts CostModel::variable_parts(const Work& work, ItemState state, std::int64_t rows, double passes) const {
  const Flops flops = all_flops(work, state);
  const double gradients = kind_.gradients ? 1 / passes : 0;
  CostParts parts;
  parts.products = product_seconds(flops.layers, static_cast<double>(rows), gradients, narrow_layers_) +
                   product_seconds(flops.experts, rows_per_expert(rows), gradients, narrow_experts_);
  parts.attention = attention_seconds(flops, work, state);
  parts.rows = passes * static_cast<double>(work.rows) * bytes_per_row_ / profile_.bytes_per_second;
  if (!has_head_ || work.outputs == 0) return parts;
  parts.head = static_cast<double>(work.outputs) * logit_bytes_ / profile_.bytes_per_second +
               head_seconds(flops.head, work.outputs);
  return parts;
}

// One forward; a backward is worth two.
double CostModel::passes_of(double again) const {
  return (kind_.gradients ? 3 + again - (1 - backward_share_) * (2 + again) : 1) + (kind_.counting_pass ? 1 : 0) +
         (kind_.sequence_pass ? 1 : 0);
}

CostParts CostModel::parts(const Work& work, ItemState state) const {
  const double again = state.recomputes_attention() ? 1 : state.recomputes_mlp() ? kGateUpPass : 0;
  const double passes = passes_of(again);
  const double reached = std::min(1.0, rows_per_expert(work.rows));  // share of the experts that any row goes to
  CostParts parts = variable_parts(work, state, work.rows, passes);
  if (kind_.gradients) {
    parts.products += (gradient_bytes_ + reached * expert_gradient_bytes_) / profile_.bytes_per_second;
    if (has_head_ && work.outputs > 0) parts.head += head_gradient_bytes_ / profile_.bytes_per_second;
  }
  const double calls = passes * (static_cast<double>(calls_) + expert_layers_ * reached * experts_ * kCallsPerExpert);
  parts.products += calls * profile_.seconds_per_call;
  return parts * profile_.fit;
}

double CostModel::seconds(const Work& work, ItemState state, const PathTraffic& path) const {
  const double of_path = product_seconds(path.flops, kManyRows, 0, 1) * profile_.fit.products;
  const double all = parts(work, state).total() + of_path, stored = static_cast<double>(bytes_.stored(work, state));
  const double forward = stored + static_cast<double>(path.forward);
  const double backward = stored + static_cast<double>(path.backward);
  if (forward + backward == 0) return all;
  const double copies = 2 * (forward + backward) / profile_.bytes_per_second;  // a read and a write
  const double forward_share = kind_.gradients ? 1.0 / 3 : 1;
  const auto waits = [&](double bytes, double share) {
    return std::max(0.0, bytes / profile_.spill_bytes_per_second - share * all);
  };
  return all + copies + waits(forward, forward_share) + waits(backward, 1 - forward_share);
}

double CostModel::marginal_seconds(const Work& work, std::int64_t full_rows) const {
  const CostParts parts = variable_parts(work, SavedState::keep, std::max(full_rows, work.rows), passes_of(0));
  return (parts * profile_.fit).total();
}

}  // namespace espalier
