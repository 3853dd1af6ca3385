#include "espalier/shape/local_shape.h"

#include <algorithm>
#include <map>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/shape/additions.h"

namespace espalier {
namespace {

std::int64_t ceil_div(std::int64_t whole, std::int64_t parts) { return (whole + parts - 1) / parts; }

void need(bool fine, const char* option, const std::string& expected, std::int64_t got) {
  if (!fine) throw OptionError({option, expected, text_of(got), ""});
}

// Parts of ceil(size / parts) leave something for the last one.
bool all_get_some(std::int64_t size, std::int64_t parts) { return (parts - 1) * ceil_div(size, parts) < size; }

// The widest, and the narrowest, dense MLP; 0 where no layer has one.
std::pair<std::int64_t, std::int64_t> dense_widths(const ModelShape& s) {
  std::pair<std::int64_t, std::int64_t> out;
  for (const LayerShape& layer : s.layer)
    if (layer.mlp == MlpKind::dense) {
      out.first = std::max(out.first, layer.inner);
      out.second = out.second == 0 ? layer.inner : std::min(out.second, layer.inner);
    }
  return out;
}

// Layers that read the keys and values of others, or inputs that the look-up computes for all layers.
void check_read_later(const ModelShape& s, const Degrees& d) {
  for (std::int64_t layer = 0; layer < s.layers(); ++layer) {
    const std::int64_t source = s.mixer(layer).source();
    if (source < 0) continue;
    const std::string why = text_of("1, because layer ", layer, " reads the keys and values of layer ", source);
    need(d.pp == 1, "--pp", why, d.pp);
    need(d.cp == 1, "--cp", why, d.cp);
    break;
  }
  if (s.layer_inputs.width == 0) return;
  const char* const why = "1, because every layer has an input from the look-up of tokens";
  need(d.pp == 1, "--pp", why, d.pp);
  need(d.cp == 1, "--cp", why, d.cp);
}

void check(const ModelShape& s, const Degrees& d) {
  check_read_later(s, d);
  for (std::size_t i = 0; i < s.layer.size(); ++i)
    if (i == 0 || s.layer[i].mixer != s.layer[i - 1].mixer) s.layer[i].mixer->require(d);
  const bool split_experts = s.expert_layers() > 0 && d.ep == 1;
  const auto [widest, narrowest] = dense_widths(s);
  need(all_get_some(s.vocabulary, d.tp) &&
           (s.layer_inputs.width == 0 || all_get_some(s.layer_inputs.vocabulary, d.tp)) &&
           (widest == 0 || (all_get_some(widest, d.tp) && all_get_some(narrowest, d.tp))) &&
           (!split_experts || all_get_some(s.expert_inner, d.tp)) &&
           (s.shared_expert.inner == 0 || all_get_some(s.shared_expert.inner, d.tp)),
       "--tp", "so few ranks that each has a part of the vocabulary and of the inner width", d.tp);
  if (d.full) require_shards_add(s);
  need(d.pp <= s.layers(), "--pp", text_of("at most ", s.layers(), " layers"), d.pp);
  if (d.ep == 1) return;
  need(s.experts > 0, "--ep", "1, because the model has no experts", d.ep);
  need(s.experts % d.ep == 0, "--ep", text_of("a divisor of ", s.experts, " experts"), d.ep);
  need(d.ep % d.tp == 0, "--ep", text_of("1 or a multiple of --tp ", d.tp), d.ep);
}

LocalShape::Range part(std::int64_t size, std::int64_t parts, std::int64_t index) {
  const std::int64_t share = ceil_div(size, parts);
  return {std::min(size, index * share), std::min(size, (index + 1) * share)};
}

}  // namespace

std::vector<Shard::Range> Shard::ranges() const {
  if (sections[0] == 0) return {{begin, end}};
  std::vector<Range> out;
  std::int64_t first = 0;
  for (const std::int64_t size : sections) {
    if (size == 0) break;
    const std::int64_t here = size * local / whole, skipped = size * begin / whole;
    out.push_back({first + skipped, first + skipped + here});
    first += size;
  }
  return out;
}

LocalShape::LocalShape(const ModelShape& whole, const Degrees& degrees, const Place& place)
    : whole_(whole),
      own_(whole),
      degrees_(degrees),
      place_(place),
      waves_in_flight_(espalier::waves_in_flight(degrees, place, true)) {
  if (!(degrees == Degrees{})) check(whole, degrees);
  if (whole.trained.quantised_parameters) check_quantised_cuts();
  layers_ = {whole.layers() * place.pp / degrees.pp, whole.layers() * (place.pp + 1) / degrees.pp};
  experts_ = part(whole.experts, degrees.ep, place.ep);
  own_.layer = {whole.layer.begin() + layers_.begin, whole.layer.begin() + layers_.end};
  std::map<const Mixer*, std::shared_ptr<const Mixer>> parts;  // layers of one mixer share its part, too
  for (LayerShape& layer : own_.layer) {
    std::shared_ptr<const Mixer>& mixer = parts[layer.mixer.get()];
    if (!mixer) mixer = degrees.tp == 1 ? layer.mixer : layer.mixer->part(degrees.tp);
    layer.mixer = mixer;
    layer.inner = ceil_div(layer.inner, degrees.tp);
  }
  own_.expert_inner = ceil_div(whole.expert_inner, portion({.cut = Cut::experts}).parts);
  own_.shared_expert.inner = ceil_div(whole.shared_expert.inner, degrees.tp);
  own_.vocabulary = ceil_div(whole.vocabulary, degrees.tp);
  own_.layer_inputs.vocabulary = ceil_div(whole.layer_inputs.vocabulary, degrees.tp);
  TrainedParameters& trained = own_.trained;
  trained.input = trained.input || trained.first_layer < layers_.begin;
  trained.first_layer = std::clamp<std::int64_t>(trained.first_layer - layers_.begin, 0, own_.layers());
}

// The inputs of some matrices are sharded over tp: cuts must be between blocks.
void LocalShape::check_quantised_cuts() const {
  const quantised::Rows& rows = quantised::rows_of(whole_.trained.quantised_form.kind);
  if (rows.whole_columns == 1) return;
  for_each_parameter(whole_, [&](const ParameterShape& parameter) {
    if (!parameter.quantised || parameter.sides[1].cut == Cut::none) return;
    const Portion p = portion(parameter.sides[1]);
    if (const std::int64_t size = parameter.sides[1].size; size % (p.parts * rows.whole_columns) != 0)
      throw OptionError(
          {text_of("--tp with --weights ", rows.word),
           text_of("ranks that divide the ", size / rows.whole_columns, " blocks of a row of ", parameter.name),
           text_of(p.parts), "take fewer ranks of tp, or leave --weights out"});
  });
}

LocalShape::Portion LocalShape::portion(const Side& side) const {
  if (side.cut == Cut::none || (side.cut == Cut::experts && degrees_.ep > 1)) return {};
  const std::int64_t parts = side.most_parts == 0 ? degrees_.tp : std::min(side.most_parts, degrees_.tp);
  return {parts, place_.tp * parts / degrees_.tp};
}

LocalShape LocalShape::last_stage() const {
  Place place = place_;
  place.pp = degrees_.pp - 1;
  LocalShape last(whole_, degrees_, place);
  last.waves_in_flight_ = espalier::waves_in_flight(degrees_, {}, true);
  return last;
}

std::int64_t LocalShape::expert_layers_before() const { return whole_.expert_layers_before(layers_.begin); }

LocalShape::Range LocalShape::vocabulary() const { return part(whole_.vocabulary, degrees_.tp, place_.tp); }
LocalShape::Range LocalShape::input_vocabulary() const {
  return part(whole_.layer_inputs.vocabulary, degrees_.tp, place_.tp);
}

std::optional<Shard> LocalShape::shard(const ParameterShape& parameter) const {
  const OuterParameters outer = outer_parameters(whole_);
  const bool first_stage = place_.pp == 0, last_stage = place_.pp == degrees_.pp - 1;
  const bool embedding = parameter.layer < 0 && parameter.name.starts_with(outer.embedding.name);
  if (embedding && !first_stage && !(last_stage && whole_.tied_head)) return {};
  if (parameter.layer < 0 && !embedding && !last_stage) return {};
  if (parameter.layer >= 0 && !layers_.has(parameter.layer)) return {};
  if (parameter.expert >= 0 && !experts_.has(parameter.expert)) return {};

  Shard shard;
  shard.of_expert = parameter.expert >= 0;
  shard.whole = shard.local = shard.end = parameter.sides[0].size;
  shard.copies = degrees_.tp;
  bool cut = false;
  for (std::size_t dim = 0; dim < parameter.sides.size(); ++dim) {
    const Side& side = parameter.sides[dim];
    if (side.cut == Cut::none) continue;
    cut = true;
    const Portion p = portion(side);
    shard.copies = degrees_.tp / p.parts;
    if (p.parts == 1) continue;
    const Range range = part(side.size, p.parts, p.index);
    shard.dim = static_cast<int>(dim);
    shard.begin = range.begin, shard.end = range.end, shard.whole = side.size;
    shard.local = ceil_div(side.size, p.parts), shard.sections = side.sections;
  }
  const bool whole_expert = shard.of_expert && degrees_.ep > 1;
  if (whole_expert) shard.copies = 1;  // the ranks of tp have different ones
  shard.partial_gradient = shard.copies > 1 && (cut || parameter.of_heads || parameter.in_parts);
  const std::int64_t replica = place_.dp * degrees_.cp + place_.cp;
  const bool first_replica = (whole_expert ? (replica * degrees_.tp + place_.tp) / degrees_.ep : replica) == 0;
  const bool here = (whole_expert || place_.tp % shard.copies == 0) && (!embedding || first_stage);
  shard.first = here && first_replica;
  shard.counted = here && (first_replica || degrees_.full);
  return shard;
}

std::int64_t LocalShape::parameters(Parameters which) const {
  if (which != Parameters::all && which != Parameters::trained && whole_.trained.all()) return 0;
  const bool every = which == Parameters::all || whole_.trained.all();
  if (every && degrees_ == Degrees{}) return whole_.parameters();
  std::int64_t total = 0;
  for_each_parameter(whole_, [&](const ParameterShape& parameter) {
    const std::optional<Shard> here = shard(parameter);
    if (!here || !belongs(parameter, which)) return;
    std::int64_t count = 1;
    for (const Side& side : parameter.sides) count *= side.size;
    if (here->dim >= 0) count = count / here->whole * here->local;
    if (which == Parameters::quantised) {
      const std::int64_t columns = here->dim == 1 ? here->local : parameter.sides[1].size;
      count = count / columns * quantised::row_bytes(whole_.trained.quantised_form, columns);
    }
    total += count;
  });
  return total;
}

}  // namespace espalier
