#include "espalier/config/rope_config.h"

#include <algorithm>
#include <utility>

namespace espalier {
namespace {

constexpr const char* kProportional = "proportional";

std::vector<double> read_factors(const Members& rope, const char* name, std::int64_t count) {
  const std::string expected = text_of("a list of ", count, " numbers above 0");
  if (!rope.has(name) || !rope.at(name).is_array() || rope.at(name).size() != static_cast<std::size_t>(count))
    rope.fail(name, expected);
  std::vector<double> factors;
  for (const Json& factor : rope.at(name)) {
    if (!factor.is_number() || !(factor.get<double>() > 0)) rope.fail(name, expected);
    factors.push_back(factor.get<double>());
  }
  return factors;
}

double read_factor(const Members& rope) {
  if (!rope.has("factor")) rope.fail("factor", "a number above 0");
  return rope.positive("factor", 1);
}

void read_llama3(const Members& rope, RopeScaling& scaling) {
  for (const char* name : {"factor", "low_freq_factor", "high_freq_factor"})
    if (!rope.has(name)) rope.fail(name, "a number above 0");
  scaling.factor = rope.positive("factor", 1);
  scaling.low_freq_factor = rope.positive("low_freq_factor", 1);
  scaling.high_freq_factor = rope.positive("high_freq_factor", 4);
  scaling.original_max_position_embeddings = rope.integer("original_max_position_embeddings", 1, 1 << 30);
  if (scaling.high_freq_factor <= scaling.low_freq_factor) rope.fail("high_freq_factor", "above low_freq_factor");
}

double mscale_of(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

void read_yarn(const Members& rope, bool nested, RopeScaling& scaling) {
  scaling.factor = read_factor(rope);
  scaling.beta_fast = rope.positive("beta_fast", 32), scaling.beta_slow = rope.positive("beta_slow", 1);
  // transformers looks for it beside the objects of layer types.
  scaling.truncate = nested || rope.flag("truncate", true);
  const bool scaled = rope.has("mscale") && rope.has("mscale_all_dim");
  const double implied = scaled ? mscale_of(scaling.factor, rope.positive("mscale", 1)) /
                                      mscale_of(scaling.factor, rope.positive("mscale_all_dim", 1))
                                : mscale_of(scaling.factor, 1);
  scaling.attention_factor = rope.positive("attention_factor", implied);
}

void read_longrope(const Members& rope, std::int64_t rotary_dim, std::int64_t max_positions, RopeScaling& scaling) {
  scaling.short_factor = read_factors(rope, "short_factor", rotary_dim / 2);
  scaling.long_factor = read_factors(rope, "long_factor", rotary_dim / 2);
  const auto original = static_cast<double>(scaling.original_max_position_embeddings);
  scaling.factor = rope.positive("factor", static_cast<double>(max_positions) / original);
  const double implied = scaling.factor <= 1 ? 1 : std::sqrt(1 + std::log(scaling.factor) / std::log(original));
  scaling.attention_factor = rope.positive("attention_factor", implied);
}

// The rotary embedding of one object, whose members may be absent.
Rope read_one(const Members& config, const Members& rope, bool nested, double theta, const Reading& reading) {
  Rope out;
  out.theta = rope.positive("rope_theta", theta);
  std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "su") type = "longrope";    // as Phi-3 called it
  if (type == "mrope") type = "default";  // three positions for each row of an image; equal for text
  if (type == "default") return out;
  out.has_scaling = true;
  RopeScaling& scaling = out.scaling;
  const std::int64_t stated =
      config.integer("original_max_position_embeddings", 1, 1 << 30,
                     rope.integer("original_max_position_embeddings", 1, 1 << 30, reading.shape.max_positions));
  if (type == "llama3") {
    read_llama3(rope, scaling);
  } else if (type == "linear") {
    scaling.type = RopeType::linear;
    scaling.factor = read_factor(rope);
  } else if (type == "yarn") {
    scaling.type = RopeType::yarn;
    scaling.original_max_position_embeddings = stated;
    read_yarn(rope, nested, scaling);
  } else if (type == "longrope") {
    scaling.type = RopeType::longrope;
    scaling.original_max_position_embeddings = stated;
    read_longrope(rope, reading.attention.rotary, reading.shape.max_positions, scaling);
  } else if (type == kProportional) {
    scaling.type = RopeType::proportional;
    scaling.factor = rope.positive("factor", 1), scaling.turning = rope.positive("partial_rotary_factor", 1);
    if (scaling.turning > 1) rope.fail("partial_rotary_factor", "a fraction");
  } else {
    rope.refuse("rope_type '" + type + "'", "rope_type default, linear, llama3, yarn, longrope or proportional");
  }
  return out;
}

// The object that holds the members, or the object in it for a kind of layers.
struct Holder {
  const Json* object = nullptr;
  std::string path;
};
Holder holder_of(const Members& config) {
  const char* name = config.has("rope_scaling") && !config.has("rope_parameters") ? "rope_scaling" : "rope_parameters";
  if (!config.has(name)) return {};
  if (!config.at(name).is_object()) config.fail(name, "an object or null");
  return {&config.at(name), text_of(name, ".")};
}
Holder part_of(const Members& config, const Holder& whole, const char* kind) {
  if (whole.object == nullptr || !whole.object->contains(kind) || whole.object->at(kind).is_null()) return {};
  if (!whole.object->at(kind).is_object()) config.fail(kind, "an object or null");
  return {&whole.object->at(kind), whole.path + kind + "."};
}

void read_rotary_dim(const Members& config, const Members& rope, const Family& family, AttentionShape& attention) {
  double factor = rope.positive("partial_rotary_factor", config.positive("partial_rotary_factor", family.rotary));
  if (family.partial_rotary && config.has("rotary_dim") && !rope.has("partial_rotary_factor"))
    factor = static_cast<double>(config.integer("rotary_dim", 2, attention.head_dim)) /
             static_cast<double>(attention.head_dim);
  if (factor != 1 && !family.partial_rotary)
    config.refuse(text_of("partial_rotary_factor = ", factor), text_of("rotation of whole heads in ", family.name));
  const std::int64_t whole = attention.rotary;  // of latent attention a part of the head
  const auto rotary = static_cast<std::int64_t>(static_cast<double>(whole) * factor);
  if (factor > 1 || rotary < 2 || rotary % 2 != 0)
    config.fail("partial_rotary_factor", text_of("a fraction of ", whole, " channels with an even number"));
  attention.rotary = rotary;
}

}  // namespace

std::optional<RopeScaling> longrope_of(const ModelShape& shape) {
  for (const LayerShape& layer : shape.layer)
    for (const RotaryShape& rotation : layer.mixer->rotations())
      if (rotation.rope.has_scaling && rotation.rope.scaling.type == RopeType::longrope) return rotation.rope.scaling;
  return std::nullopt;
}

std::string long_factors_note(const ModelShape& shape, std::int64_t longest, const std::string& what) {
  const std::optional<RopeScaling> scaling = longrope_of(shape);
  if (!scaling || !scaling->is_long(longest)) return "";
  return text_of(what, ", more than original_max_position_embeddings = ", scaling->original_max_position_embeddings,
                 ": all rows rotate by long_factor of longrope, those of shorter rollouts too");
}

std::vector<std::string> position_notes(const ModelShape& shape, std::int64_t longest, const std::string& what) {
  std::vector<std::string> notes;
  if (shape.max_positions > 0 && longest > shape.max_positions)
    notes.push_back(
        text_of(what, ", more than the model's ", shape.max_positions, " positions (max_position_embeddings)"));
  if (std::string note = long_factors_note(shape, longest, what); !note.empty()) notes.push_back(std::move(note));
  return notes;
}

void read_rope(const Members& config, const Family& family, Reading& reading) {
  static const Json none = Json::object();
  AttentionShape& attention = reading.attention;
  const Holder whole = holder_of(config), full = part_of(config, whole, "full_attention"),
               sliding = part_of(config, whole, "sliding_attention");
  const auto members = [&](const Holder& holder) {
    return Members(holder.object != nullptr ? *holder.object : none, config.where(), holder.path);
  };
  const bool nested = full.object != nullptr || sliding.object != nullptr;
  if (family.rope_stated && whole.object == nullptr)
    config.fail("rope_scaling", text_of("an object (absent it means a scaling in ", family.name, ")"));
  const Members of_full = members(nested ? full : whole);
  if (of_full.text("rope_type", "") != kProportional) read_rotary_dim(config, of_full, family, attention);
  const double theta = config.positive("rope_theta", family.rope_theta);
  attention.rope = read_one(config, of_full, nested, theta, reading);
  attention.interleaved = family.pairs_member ? config.flag("rope_interleave", family.interleaved) : family.interleaved;
  if (family.latent && attention.rope.has_scaling && of_full.has("mscale_all_dim")) {
    const double mscale = mscale_of(of_full.positive("factor", 1), of_full.positive("mscale_all_dim", 1));
    attention.scale = mscale * mscale / std::sqrt(static_cast<double>(attention.head_dim));
  }
  if (family.query_growth) {
    if (!of_full.has("llama_4_scaling_beta")) of_full.fail("llama_4_scaling_beta", "a number above 0");
    attention.query_growth = of_full.positive("llama_4_scaling_beta", 1);
    attention.growth_length = of_full.integer("original_max_position_embeddings", 1, 1 << 30);
  }
  if (!family.window_rope.own) return;
  reading.window_rope = read_one(config, members(sliding), true,
                                 config.positive(family.window_rope.theta_member, family.window_rope.theta), reading);
}

}  // namespace espalier
