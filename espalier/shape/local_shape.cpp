#include "espalier/shape/local_shape.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/base/nf4.h"

namespace espalier {
namespace {

std::int64_t ceil_div(std::int64_t whole, std::int64_t parts) { return (whole + parts - 1) / parts; }

void need(bool fine, const char* option, const std::string& expected, std::int64_t got) {
  if (!fine) throw OptionError({option, expected, text_of(got), ""});
}

// Parts of ceil(size / parts) leave something for the last one.
bool all_get_some(std::int64_t size, std::int64_t parts) { return (parts - 1) * ceil_div(size, parts) < size; }

void check(const ModelShape& s, const Degrees& d) {
  need(s.heads % d.tp == 0, "--tp", text_of("a divisor of ", s.heads, " attention heads"), d.tp);
  need(s.kv_heads % d.tp == 0 || d.tp % s.kv_heads == 0, "--tp",
       text_of("a divisor or a multiple of ", s.kv_heads, " key/value heads"), d.tp);
  need(!s.has_states() || s.delta_rule.key_heads % d.tp == 0, "--tp",
       text_of("a divisor of the ", s.delta_rule.key_heads, " key heads of recurrent layers"), d.tp);
  need(!s.has_states() || d.cp == 1, "--cp", "1, because the model has recurrent layers", d.cp);
  const bool dense_layers = s.expert_layers()<s.layers, split_experts = s.expert_layers()> 0 && d.ep == 1;
  need(all_get_some(s.vocabulary, d.tp) && (!dense_layers || all_get_some(s.inner, d.tp)) &&
           (!split_experts || all_get_some(s.expert_inner, d.tp)) &&
           (s.shared_expert.inner == 0 || all_get_some(s.shared_expert.inner, d.tp)),
       "--tp", "so few ranks that each has a part of the vocabulary and of the inner width", d.tp);
  need(!(s.qk_norm && s.attention.wide_norm) || d.tp == 1, "--tp",
       "1, because the norms of queries and keys are over all heads", d.tp);
  if (d.full && s.tied_head && s.trained.adapter.head)
    throw OptionError(
        {"--shard", "none or optimizer, because the head is tied to the embedding and has an adapter", "full", ""});
  need(d.pp <= s.layers, "--pp", text_of("at most ", s.layers, " layers"), d.pp);
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
  if (whole.trained.nf4_parameters) check_nf4_blocks();
  layers_ = {whole.layers * place.pp / degrees.pp, whole.layers * (place.pp + 1) / degrees.pp};
  experts_ = part(whole.experts, degrees.ep, place.ep);
  own_.heads = ceil_div(whole.heads, portion(Cut::heads).parts);
  own_.kv_heads = ceil_div(whole.kv_heads, portion(Cut::kv_heads).parts);
  own_.delta_rule.key_heads = ceil_div(whole.delta_rule.key_heads, portion(Cut::state_heads).parts);
  own_.delta_rule.value_heads = ceil_div(whole.delta_rule.value_heads, portion(Cut::state_heads).parts);
  own_.inner = ceil_div(whole.inner, portion(Cut::inner).parts);
  own_.expert_inner = ceil_div(whole.expert_inner, portion(Cut::expert_inner).parts);
  own_.shared_expert.inner = ceil_div(whole.shared_expert.inner, portion(Cut::shared_inner).parts);
  own_.vocabulary = ceil_div(whole.vocabulary, portion(Cut::vocabulary).parts);
  own_.layers = layers_.size();
  TrainedParameters& trained = own_.trained;
  trained.input = trained.input || trained.first_layer < layers_.begin;
  trained.first_layer = std::clamp<std::int64_t>(trained.first_layer - layers_.begin, 0, own_.layers);
  if (!trained.of_layer.empty())
    trained.of_layer = {trained.of_layer.begin() + layers_.begin, trained.of_layer.begin() + layers_.end};
  if (std::vector<AdaptedLayer>& adapted = trained.adapter.of_layer; !adapted.empty())
    adapted = {adapted.begin() + layers_.begin, adapted.begin() + layers_.end};
  if (!whole.expert_layer.empty())
    own_.expert_layer.assign(whole.expert_layer.begin() + layers_.begin, whole.expert_layer.begin() + layers_.end);
  if (!whole.window_layer.empty())
    own_.window_layer.assign(whole.window_layer.begin() + layers_.begin, whole.window_layer.begin() + layers_.end);
  if (!whole.unrotated_layer.empty())
    own_.unrotated_layer.assign(whole.unrotated_layer.begin() + layers_.begin,
                                whole.unrotated_layer.begin() + layers_.end);
  if (!whole.mixer_of_layer.empty())
    own_.mixer_of_layer.assign(whole.mixer_of_layer.begin() + layers_.begin,
                               whole.mixer_of_layer.begin() + layers_.end);
  if (!whole.without_mlp.empty())
    own_.without_mlp.assign(whole.without_mlp.begin() + layers_.begin, whole.without_mlp.begin() + layers_.end);
}

// Ranks of tp divide the inputs of some matrices: between blocks.
void LocalShape::check_nf4_blocks() const {
  for_each_parameter(whole_, [&](const ParameterShape& parameter) {
    if (!parameter.nf4 || parameter.sides[1].cut == Cut::none) return;
    const Portion p = portion(parameter.sides[1].cut);
    if (const std::int64_t size = parameter.sides[1].size; size % (p.parts * nf4::kBlock) != 0)
      throw OptionError({"--tp with --weights nf4",
                         text_of("ranks that divide the ", size / nf4::kBlock, " blocks of a row of ", parameter.name),
                         text_of(p.parts), "take fewer ranks of tp, or leave --weights out"});
  });
}

LocalShape::Portion LocalShape::portion(Cut cut) const {
  const Portion all{degrees_.tp, place_.tp};
  switch (cut) {
    case Cut::none:
      return {};
    case Cut::heads:
    case Cut::state_heads:
    case Cut::inner:
    case Cut::shared_inner:
    case Cut::vocabulary:
      return all;
    case Cut::kv_heads: {
      const std::int64_t parts = std::clamp<std::int64_t>(whole_.kv_heads, 1, degrees_.tp);
      return {parts, place_.tp * parts / degrees_.tp};
    }
    case Cut::expert_inner:
      return degrees_.ep == 1 ? all : Portion{};
  }
  return {};
}

LocalShape LocalShape::last_stage() const {
  Place place = place_;
  place.pp = degrees_.pp - 1;
  LocalShape last(whole_, degrees_, place);
  last.waves_in_flight_ = espalier::waves_in_flight(degrees_, {}, true);
  return last;
}

std::int64_t LocalShape::expert_layers_before() const {
  const auto& kinds = whole_.expert_layer;
  return kinds.empty() ? 0 : std::count(kinds.begin(), kinds.begin() + layers_.begin, std::uint8_t{1});
}

LocalShape::Range LocalShape::vocabulary() const {
  const Portion p = portion(Cut::vocabulary);
  return part(whole_.vocabulary, p.parts, p.index);
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
  Cut cut = Cut::none;
  for (std::size_t dim = 0; dim < parameter.sides.size(); ++dim) {
    const Side& side = parameter.sides[dim];
    if (side.cut == Cut::none) continue;
    cut = side.cut;
    const Portion p = portion(cut);
    shard.copies = degrees_.tp / p.parts;
    if (p.parts == 1) continue;
    const Range range = part(side.size, p.parts, p.index);
    shard.dim = static_cast<int>(dim);
    shard.begin = range.begin, shard.end = range.end, shard.whole = side.size;
    shard.local = ceil_div(side.size, p.parts), shard.sections = side.sections;
  }
  const bool whole_expert = shard.of_expert && degrees_.ep > 1;
  if (whole_expert) shard.copies = 1;  // the ranks of tp have different ones
  shard.partial_gradient = shard.copies > 1 && (cut == Cut::kv_heads || parameter.of_heads || parameter.in_parts);
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
    if (which == Parameters::nf4) {
      const std::int64_t columns = here->dim == 1 ? here->local : parameter.sides[1].size;
      count = count / columns * nf4::row_bytes(columns, whole_.trained.nf4_nested);
    }
    total += count;
  });
  return total;
}

}  // namespace espalier
