#include "tests/support/oracle.h"

#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/delta_rule/shape.h"
#include "espalier/mixers/kimi_delta/shape.h"
#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/mixers/mamba2/shape.h"
#include "espalier/mixers/short_convolution/shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier::testing {
namespace {

using at::Tensor;
using at::indexing::Slice;

struct Weights {
  std::map<std::string, Tensor> by_name;  // leaves that require gradients
  const Tensor& operator[](const std::string& name) const { return by_name.at(name); }
  Tensor bias(const std::string& name) const { return by_name.count(name) ? by_name.at(name) : Tensor(); }
};

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return weight * (x * at::rsqrt(x.pow(2).mean(-1, true) + eps));
}

Tensor norm(const ModelShape& shape, const Tensor& x, const Weights& w, const std::string& name) {
  const Tensor& weight = w[name + ".weight"];
  if (shape.norm == NormKind::layer)
    return at::layer_norm(x, {x.size(-1)}, weight, w[name + ".bias"], shape.rms_norm_eps);
  return rms_norm(x, shape.norm == NormKind::rms_plus_one ? weight + 1 : weight, shape.rms_norm_eps);
}

Tensor affine(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor y = at::matmul(x, weight.t());
  return bias.defined() ? y + bias : y;
}

double ramp(double i, const Rope& rope, double dim) {
  const auto channel = [&](double turns) {
    return dim * std::log(static_cast<double>(rope.scaling.original_max_position_embeddings) / (turns * 2 * M_PI)) /
           (2 * std::log(rope.theta));
  };
  double low = channel(rope.scaling.beta_fast), high = channel(rope.scaling.beta_slow);
  if (rope.scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, dim - 1);
  return std::min(1.0, std::max(0.0, (i - low) / (low == high ? 0.001 : high - low)));
}

Tensor inverse_frequencies(const Rope& rope, std::int64_t dim, const at::TensorOptions& options) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < dim / 2; ++i) {
    double f = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    const RopeScaling& s = rope.scaling;
    if (rope.has_scaling && s.type == RopeType::llama3) {
      const double length = 2 * M_PI / f, context = static_cast<double>(s.original_max_position_embeddings);
      if (length > context / s.low_freq_factor) {
        f /= s.factor;
      } else if (length >= context / s.high_freq_factor) {
        const double smooth = (context / length - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
        f = (1 - smooth) * f / s.factor + smooth * f;
      }
    } else if (rope.has_scaling && s.type == RopeType::linear) {
      f /= s.factor;
    } else if (rope.has_scaling && s.type == RopeType::yarn) {
      const double r = ramp(static_cast<double>(i), rope, static_cast<double>(dim));
      f = f / s.factor * r + f * (1 - r);
    } else if (rope.has_scaling && s.type == RopeType::proportional) {
      f = static_cast<double>(2 * i + 2) <= s.turning * static_cast<double>(dim) ? f / s.factor : 0;
    } else if (rope.has_scaling) {
      f /= s.short_factor[static_cast<std::size_t>(i)];
    }
    out.push_back(f);
  }
  return at::tensor(out, options);
}

// cos and sin [n, 1, K/2].
std::pair<Tensor, Tensor> turns(const Rope& rope, std::int64_t dim, std::int64_t n, const at::TensorOptions& options) {
  const Tensor angle = at::outer(at::arange(n, options), inverse_frequencies(rope, dim, options)).unsqueeze(1);
  const double factor = rope.has_scaling ? rope.scaling.attention_factor : 1;
  return {angle.cos() * factor, angle.sin() * factor};
}

// x [n, heads, D]; the first channels rotate, in halves or in neighbouring pairs.
Tensor rotate(bool interleaved, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const std::int64_t rotary = 2 * cos.size(2);
  const Tensor turning = x.slice(2, 0, rotary), rest = x.slice(2, rotary);
  if (interleaved) {
    const Tensor a = turning.slice(2, 0, rotary, 2), b = turning.slice(2, 1, rotary, 2);
    return at::concat({at::stack({a * cos - b * sin, b * cos + a * sin}, 3).flatten(2), rest}, 2);
  }
  const Tensor a = turning.slice(2, 0, rotary / 2), b = turning.slice(2, rotary / 2);
  return at::concat({a * cos - b * sin, b * cos + a * sin, rest}, 2);
}

Tensor activation(const ModelShape& shape, const Tensor& x) {
  if (shape.activation.kind == Activation::silu) return x * x.sigmoid();
  if (shape.activation.kind == Activation::relu_squared) return x.relu() * x.relu();
  return at::gelu(x, shape.activation.kind == Activation::gelu ? "none" : "tanh");
}

// The MLP of the modules with these names.
Tensor mlp_of(const ModelShape& shape, const Tensor& x, const Weights& w, const std::string& prefix,
              const char* gate_name, const char* up_name, const char* down_name) {
  const auto product = [&](const Tensor& rows, const char* name) {
    return affine(rows, w[prefix + name + ".weight"], w.bias(prefix + name + ".bias"));
  };
  const Tensor up = product(x, up_name);
  if (!shape.activation.gated) return product(activation(shape, up), down_name);
  const Tensor gate = product(x, gate_name);
  if (shape.activation.kind != Activation::clamped) return product(activation(shape, gate) * up, down_name);
  const Tensor g = gate.clamp_max(shape.activation.limit),
               u = up.clamp(-shape.activation.limit, shape.activation.limit);
  return product(g * (1.702 * g).sigmoid() * (u + 1), down_name);
}

// A rollout's pass through one router, as far as the router losses need it.
struct Routing {
  std::int64_t layer;
  Tensor probability;  // [n, E]
  Tensor log_sum_exp;  // [n]
  Tensor chosen;       // [n, E], 1 where the token goes
};

// Tokens with recorded experts go there, whatever the probabilities are. `place`: of the layer among those recorded.
void replay(const Rollout& rollout, std::int64_t place, const Tensor& chosen) {
  const RecordedExperts& routes = rollout.recorded_experts;
  for (std::int64_t t = 0; t < routes.tokens; ++t) {
    const std::int64_t first = (t * routes.layers + place) * routes.chosen;
    if (routes.ids[first] == RecordedExperts::kFree) continue;
    chosen[t].zero_();
    for (std::int64_t j = 0; j < routes.chosen; ++j) chosen[t][routes.ids[first + j]].fill_(1);
  }
}

// The scores of experts outside of the best groups become -infinity. A group's own score is the sum of its two best
// where scores are sigmoids, else its best.
Tensor of_best_groups(const ModelShape& shape, const Tensor& score) {
  const std::int64_t n = score.size(0), G = shape.router.groups;
  const Tensor grouped = score.view({n, G, shape.experts / G});
  const Tensor best = std::get<0>(at::sort(grouped, -1, /*descending=*/true));
  const Tensor of_group = best.slice(2, 0, shape.router.sigmoid ? 2 : 1).sum(-1);
  const Tensor order = std::get<1>(at::sort(of_group, /*stable=*/true, -1, /*descending=*/true));
  const Tensor kept = at::zeros_like(of_group).scatter_(1, order.slice(1, 0, shape.router.top_groups), 1.0);
  return at::where(kept.unsqueeze(2).expand_as(grouped).gt(0), grouped, -INFINITY).reshape({n, shape.experts});
}

// Every expert runs on every token; the weights of those not chosen are zero. x_router: the rows that the router reads.
Tensor routed(const ModelShape& shape, const Weights& w, const Tensor& x_router, const Tensor& x, std::int64_t layer,
              const Rollout& rollout, std::vector<Routing>& routings) {
  const std::string router = layer_prefix(layer) + shape.names.router;
  const Tensor logits = affine(x_router, w[router + ".weight"], w.bias(router + ".bias"));
  const Tensor probability = shape.router.sigmoid ? logits.sigmoid() : logits.softmax(-1);
  Tensor score = probability.detach();
  if (shape.router.correction_bias) score = score + w[layer_prefix(layer) + shape.names.correction_bias].detach();
  if (shape.router.groups > 1) score = of_best_groups(shape, score);
  // A stable sort: ties go to the lower expert.
  const Tensor order = std::get<1>(at::sort(score, /*stable=*/true, -1, /*descending=*/true));
  const Tensor best = order.slice(1, 0, shape.experts_per_token);
  const Tensor chosen = at::zeros_like(probability.detach()).scatter_(1, best, 1.0);
  replay(rollout, static_cast<std::int64_t>(routings.size()), chosen);
  Tensor weight = probability * chosen;
  if (shape.norm_topk_prob) weight = weight / weight.sum(-1, true);
  weight = weight * shape.router.scaling;
  if (shape.router.expert_scale) weight = weight * w[layer_prefix(layer) + shape.names.expert_scale];
  Tensor out = at::zeros_like(x);
  for (std::int64_t e = 0; e < shape.experts; ++e)
    out = out + weight.slice(1, e, e + 1) * mlp_of(shape, x, w, expert_prefix(shape, layer, e), shape.names.expert_gate,
                                                   shape.names.expert_up, shape.names.expert_down);
  routings.push_back({layer, probability, logits.logsumexp(-1), chosen});
  return out;
}

// The addition of a layer's MLP with experts, before the norm behind it. y: the stream, x: its rows behind the layer's
// norm.
Tensor experts(const ModelShape& shape, const Weights& w, const Tensor& y, const Tensor& x, std::int64_t layer,
               const Rollout& rollout, std::vector<Routing>& routings) {
  const std::string p = layer_prefix(layer);
  const ParameterNames& names = shape.names;
  const auto shared = [&] { return mlp_of(shape, x, w, p, names.shared_gate, names.shared_up, names.shared_down); };
  if (shape.shared_expert.apart) {
    const auto normed = [&](const Tensor& rows, const char* name) {
      return rms_norm(rows, w[p + name], shape.rms_norm_eps);
    };
    const Tensor x_router = normed(y, names.router_scale) / std::sqrt(static_cast<double>(shape.hidden));
    const Tensor of_experts = routed(shape, w, x_router, normed(y, names.expert_norm), layer, rollout, routings);
    return normed(shared(), names.shared_post_norm) + normed(of_experts, names.expert_post_norm);
  }
  const Tensor out = routed(shape, w, x, x, layer, rollout, routings);
  if (shape.shared_expert.inner == 0) return out;
  if (!shape.shared_expert.gate) return out + shared();
  return out + shared() * at::matmul(x, w[p + names.shared_expert_gate + ".weight"].t()).sigmoid();
}

// The rows of a tensor, taken apart at once: the gradient of x[t] alone has the size of x.
class Rows {
 public:
  explicit Rows(const Tensor& x) : rows_(x.unbind(0)) {}
  const Tensor& operator[](std::int64_t row) const { return rows_[static_cast<std::size_t>(row)]; }

 private:
  std::vector<Tensor> rows_;
};

// Mamba-2, one row at a time. h [n, M] is the normed input; the result is what the mixer adds.
Tensor mamba(const RecurrenceShape& s, double eps, const Weights& w, const Tensor& h, const std::string& p) {
  const std::int64_t n = h.size(0), G = s.key_heads, H = s.value_heads, N = s.key_dim, P = s.value_dim, V = H * P,
                     each = H / G;
  const auto parts = at::matmul(h, w[p + "in_proj.weight"].t()).split_with_sizes({V, V + 2 * G * N, H}, 1);
  const Tensor z = parts[0], x = parts[1], conv = w[p + "conv1d.weight"].squeeze(1);
  const Tensor padded = at::concat({at::zeros({s.kernel - 1, x.size(1)}, x.options()), x});
  Tensor c = s.conv_bias ? w[p + "conv1d.bias"] : at::zeros({x.size(1)}, x.options());
  for (std::int64_t j = 0; j < s.kernel; ++j) c = c + conv.select(1, j) * padded.slice(0, j, j + n);
  c = c * c.sigmoid();
  const auto mixed = c.split_with_sizes({V, G * N, G * N}, 1);
  const auto heads = [&](const Tensor& part) { return part.reshape({n, G, N}).repeat_interleave(each, 1); };
  const Tensor v = mixed[0].reshape({n, H, P}), b = heads(mixed[1]), q = heads(mixed[2]);
  const Tensor step = (1 + (parts[2] + w[p + "dt_bias"]).exp()).log().clamp(s.least_step, s.largest_step);
  const Tensor decay = (-w[p + "A_log"].exp() * step).exp();
  Tensor state = at::zeros({H, N, P}, x.options());
  std::vector<Tensor> out;
  const Rows decays(decay), bs(b), steps(step), vs(v), qs(q);
  for (std::int64_t t = 0; t < n; ++t) {
    state = state * decays[t].view({H, 1, 1}) + bs[t].unsqueeze(2) * (steps[t].unsqueeze(1) * vs[t]).unsqueeze(1);
    out.push_back((state * qs[t].unsqueeze(2)).sum(1) + w[p + "D"].unsqueeze(1) * vs[t]);
  }
  const Tensor u = (at::stack(out).reshape({n, V}) * z * z.sigmoid()).reshape({n, G, V / G});
  const Tensor y = rms_norm(u, at::ones({1}, u.options()), eps).reshape({n, V}) * w[p + "norm.weight"];
  return at::matmul(y, w[p + "out_proj.weight"].t());
}

// LFM2's convolution between two gates, of the normed input h [n, M]; the result is what the mixer adds.
Tensor short_convolution(const ShortConvolutionShape& s, const Weights& w, const Tensor& h, const std::string& p) {
  const std::int64_t n = h.size(0);
  const auto parts = affine(h, w[p + "in_proj.weight"], w.bias(p + "in_proj.bias")).chunk(3, 1);
  const Tensor gated = parts[0] * parts[2], conv = w[p + "conv.weight"].squeeze(1);
  const Tensor padded = at::concat({at::zeros({s.kernel - 1, s.channels}, h.options()), gated});
  Tensor mixed = s.bias ? w[p + "conv.bias"].expand({n, s.channels}) : at::zeros({n, s.channels}, h.options());
  for (std::int64_t j = 0; j < s.kernel; ++j) mixed = mixed + conv.select(1, j) * padded.slice(0, j, j + n);
  return affine(parts[1] * mixed, w[p + "out_proj.weight"], w.bias(p + "out_proj.bias"));
}

// The delta rule with decays of channels, one row at a time, as mamba.
Tensor channel_delta_rule(const RecurrenceShape& s, double eps, const Weights& w, const Tensor& h,
                          const std::string& p) {
  const std::int64_t n = h.size(0), H = s.value_heads, D = s.key_dim;
  const auto product = [&](const Tensor& x, const char* name) { return at::matmul(x, w[p + name + ".weight"].t()); };
  const auto mixed = [&](const char* projection, const char* convolution) {
    const Tensor x = product(h, projection), conv = w[p + convolution + ".weight"].squeeze(1);
    const Tensor padded = at::concat({at::zeros({s.kernel - 1, x.size(1)}, x.options()), x});
    Tensor c = at::zeros_like(x);
    for (std::int64_t j = 0; j < s.kernel; ++j) c = c + conv.select(1, j) * padded.slice(0, j, j + n);
    return (c * c.sigmoid()).view({n, H, D});
  };
  const auto unit = [](const Tensor& heads) { return heads / (heads.pow(2).sum(-1, true) + 1e-6).sqrt(); };
  const Tensor q = unit(mixed("q_proj", "q_conv1d")) / std::sqrt(static_cast<double>(D)),
               k = unit(mixed("k_proj", "k_conv1d")), v = mixed("v_proj", "v_conv1d");
  const Tensor a = product(product(h, "f_a_proj"), "f_b_proj") + w[p + "dt_bias"];
  const Tensor decay = (-w[p + "A_log"].exp().view({H, 1}) * (1 + a.exp()).log().view({n, H, D})).exp();
  const Tensor beta = product(h, "b_proj").sigmoid();
  Tensor state = at::zeros({H, D, D}, h.options());
  std::vector<Tensor> out;
  const Rows decays(decay), betas(beta), vs(v), ks(k), qs(q);
  for (std::int64_t t = 0; t < n; ++t) {
    state = state * decays[t].unsqueeze(2);
    const Tensor error = vs[t] - (state * ks[t].unsqueeze(2)).sum(1);
    state = state + ks[t].unsqueeze(2) * (betas[t].unsqueeze(1) * error).unsqueeze(1);
    out.push_back((state * qs[t].unsqueeze(2)).sum(1));
  }
  const Tensor gate = product(product(h, "g_a_proj"), "g_b_proj").view({n, H, D}).sigmoid();
  return product((rms_norm(at::stack(out), w[p + "o_norm.weight"], eps) * gate).reshape({n, H * D}), "o_proj");
}

testing::Recurrence replaced_delta_rule = nullptr;

// The gated delta rule, one row at a time. h [n, M] is the normed input; the result is what the mixer adds.
Tensor delta_rule(const RecurrenceShape& s, double eps, const Weights& w, const Tensor& h, const std::string& p) {
  const std::int64_t n = h.size(0), Hk = s.key_heads, Hv = s.value_heads, dk = s.key_dim, dv = s.value_dim,
                     each = Hv / Hk;
  Tensor q, k, v, z, b, a;
  if (s.by_key_head) {
    const Tensor qkvz = at::matmul(h, w[p + "in_proj_qkvz.weight"].t()).view({n, Hk, -1});
    const Tensor ba = at::matmul(h, w[p + "in_proj_ba.weight"].t()).view({n, Hk, -1});
    const auto parts = qkvz.split_with_sizes({dk, dk, each * dv, each * dv}, 2);
    q = parts[0].reshape({n, Hk * dk}), k = parts[1].reshape({n, Hk * dk});
    v = parts[2].reshape({n, Hv * dv}), z = parts[3].reshape({n, Hv, dv});
    b = ba.slice(2, 0, each).reshape({n, Hv}), a = ba.slice(2, each).reshape({n, Hv});
  } else {
    const auto parts = at::matmul(h, w[p + "in_proj_qkv.weight"].t()).split_with_sizes({Hk * dk, Hk * dk, Hv * dv}, 1);
    q = parts[0], k = parts[1], v = parts[2];
    z = at::matmul(h, w[p + "in_proj_z.weight"].t()).view({n, Hv, dv});
    b = at::matmul(h, w[p + "in_proj_b.weight"].t()), a = at::matmul(h, w[p + "in_proj_a.weight"].t());
  }
  const auto gated_output = [&](const Tensor& mixed) {
    const Tensor o = rms_norm(mixed, w[p + "norm.weight"], eps) * z * z.sigmoid();
    return at::matmul(o.reshape({n, Hv * dv}), w[p + "out_proj.weight"].t());
  };
  if (replaced_delta_rule != nullptr) return gated_output(replaced_delta_rule(q, k, v).reshape({n, Hv, dv}));
  const Tensor x = at::concat({q, k, v}, 1), conv = w[p + "conv1d.weight"].squeeze(1);
  const Tensor padded = at::concat({at::zeros({s.kernel - 1, x.size(1)}, x.options()), x});
  Tensor c = at::zeros_like(x);
  for (std::int64_t j = 0; j < s.kernel; ++j) c = c + conv.select(1, j) * padded.slice(0, j, j + n);
  c = c * c.sigmoid();
  const auto unit = [&](const Tensor& part) {
    const Tensor heads = part.reshape({n, Hk, dk});
    return (heads / (heads.pow(2).sum(-1, true) + 1e-6).sqrt()).repeat_interleave(each, 1);
  };
  q = unit(c.slice(1, 0, Hk * dk)) / std::sqrt(static_cast<double>(dk)), k = unit(c.slice(1, Hk * dk, 2 * Hk * dk));
  v = c.slice(1, 2 * Hk * dk).reshape({n, Hv, dv});
  const Tensor decay = (-w[p + "A_log"].exp() * (1 + (a + w[p + "dt_bias"]).exp()).log()).exp(), beta = b.sigmoid();
  Tensor state = at::zeros({Hv, dk, dv}, x.options());
  std::vector<Tensor> out;
  const Rows decays(decay), betas(beta), vs(v), ks(k), qs(q);
  for (std::int64_t t = 0; t < n; ++t) {
    state = state * decays[t].view({Hv, 1, 1});
    const Tensor error = vs[t] - (state * ks[t].unsqueeze(2)).sum(1);
    state = state + ks[t].unsqueeze(2) * (betas[t].unsqueeze(1) * error).unsqueeze(1);
    out.push_back((state * qs[t].unsqueeze(2)).sum(1));
  }
  return gated_output(at::stack(out));
}

// Rows attend to themselves and those above them, of a window to its last ones. q [n, H, D], k [n, J, D], v [n, J, Dv];
// the result [n, H Dv]. `sinks` [H]: a logit of each head that joins the softmax.
Tensor attend(Tensor q, Tensor k, Tensor v, double scale, double soft_cap, std::int64_t window, const Tensor& sinks) {
  const std::int64_t n = q.size(0), H = q.size(1), each = H / k.size(1);
  q = q.transpose(0, 1);
  k = k.repeat_interleave(each, 1).transpose(0, 1);
  v = v.repeat_interleave(each, 1).transpose(0, 1);
  Tensor scores =
      at::matmul(q, k.transpose(1, 2)) * (scale > 0 ? scale : 1 / std::sqrt(static_cast<double>(q.size(2))));
  if (soft_cap > 0) scores = (scores / soft_cap).tanh() * soft_cap;
  Tensor hidden = at::ones({n, n}, at::kBool).triu(1);
  if (window > 0) hidden = hidden.logical_or(at::ones({n, n}, at::kBool).tril(-window));
  scores = scores.masked_fill(hidden, -INFINITY);
  if (sinks.defined()) scores = at::concat({scores, sinks.view({H, 1, 1}).expand({H, n, 1})}, 2);
  return at::matmul(scores.softmax(-1).slice(2, 0, n), v).transpose(0, 1).flatten(1);
}

// Latent attention from the normed input h [n, M], before its output's projection.
Tensor latent_attention(const LatentShape& s, const Weights& w, const Tensor& h, const std::string& a) {
  const std::int64_t n = h.size(0), H = s.heads;
  const auto product = [&](const Tensor& x, const char* name) {
    return affine(x, w[a + name + ".weight"], w.bias(a + name + ".bias"));
  };
  const Tensor of_query =
      s.query > 0 ? product(rms_norm(product(h, "q_a_proj"), w[a + "q_a_layernorm.weight"], 1e-6), "q_b_proj")
                  : product(h, "q_proj");
  const Tensor q = of_query.view({n, H, s.plain + s.rotary}), down = product(h, "kv_a_proj_with_mqa");
  const Tensor latent = rms_norm(down.slice(1, 0, s.key_value), w[a + "kv_a_layernorm.weight"], 1e-6);
  const Tensor kv = product(latent, "kv_b_proj").view({n, H, s.plain + s.value});
  const auto [cos, sin] = turns(s.rope, s.rotary, n, h.options());
  const auto turned = [&, &cos = cos, &sin = sin](const Tensor& x) {
    return s.rotates ? rotate(s.interleaved, x, cos, sin) : x;
  };
  const Tensor shared = turned(down.slice(1, s.key_value).unsqueeze(1));
  return attend(at::concat({q.slice(2, 0, s.plain), turned(q.slice(2, s.plain))}, 2),
                at::concat({kv.slice(2, 0, s.plain), shared.expand({n, H, s.rotary})}, 2), kv.slice(2, s.plain),
                s.scale, s.soft_cap, 0, {});
}

std::string without_weight(const std::string& name) { return name.substr(0, name.size() - std::strlen(".weight")); }

// Keys and values of the layers so far, [n, J, D] of each.
using Kept = std::map<std::int64_t, std::pair<Tensor, Tensor>>;

// Attention from the normed input h [n, M] of a layer, before its output's projection.
Tensor attention(const ModelShape& shape, const AttentionShape& s, const Weights& w, const Tensor& h,
                 std::int64_t layer, Kept& kept, const std::string& p) {
  const std::string a = p + "self_attn.";
  const std::int64_t n = h.size(0), D = s.head_dim;
  Tensor gate;
  const auto heads = [&](const char* name, const char* norm_name, std::int64_t count) {
    Tensor y = affine(h, w[a + name + ".weight"], w.bias(a + name + ".bias"));
    if (!s.wide_norm) y = y.view({n, count, -1});
    if (y.dim() == 3 && y.size(2) == 2 * D) gate = y.slice(2, D).reshape({n, count * D}), y = y.slice(2, 0, D);
    if (s.qk_norm && norm_name != nullptr) y = norm(shape, y, w, p + without_weight(norm_name));
    return y.reshape({n, count, D});
  };
  const auto turned = [&](const Tensor& x) {
    if (s.rotary == 0) return x;
    const auto [cos, sin] = turns(s.rope, s.rotary, n, h.options());
    return rotate(s.interleaved, x, cos, sin);
  };
  Tensor q = turned(heads("q_proj", s.names.query_norm, s.heads));
  if (s.source < 0) {
    Tensor values = heads(s.keys_as_values ? "k_proj" : "v_proj", nullptr, s.kv_heads);
    if (s.value_norm) values = rms_norm(values, at::ones({1}, h.options()), s.norm_eps);
    kept[layer] = {turned(heads("k_proj", s.names.key_norm, s.kv_heads)), values};
  }
  const auto& [k, v] = kept.at(s.source < 0 ? layer : s.source);
  if (s.query_growth > 0) {
    const Tensor cell = (at::arange(n, h.options()) / static_cast<double>(s.growth_length)).floor();
    q = q * (1 + s.query_growth * (1 + cell).log()).view({n, 1, 1});
  }
  const Tensor attended = attend(q, k, v, s.scale, s.soft_cap, s.window, s.sinks ? w[a + "sinks"] : Tensor());
  return s.output_gate ? attended * gate.sigmoid() : attended;
}

// The rows that a layer's mixer adds, from its input h [n, M].
Tensor mixed_rows(const ModelShape& shape, const Mixer& mixer, const Weights& w, const Tensor& h, std::int64_t layer,
                  Kept& kept, const std::string& p) {
  const std::string a = p + "self_attn.";
  const double eps = shape.rms_norm_eps;
  const auto projected = [&](const Tensor& rows, const std::string& name) {
    return affine(rows, w[p + name + ".weight"], w.bias(p + name + ".bias"));
  };
  switch (mixer.kind()) {
    case MixerKind::attention:
      return projected(attention(shape, static_cast<const Attention&>(mixer).shape, w, h, layer, kept, p),
                       static_cast<const Attention&>(mixer).shape.names.output);
    case MixerKind::latent_attention:
      return projected(latent_attention(static_cast<const LatentAttention&>(mixer).shape, w, h, a), "self_attn.o_proj");
    case MixerKind::delta_rule:
      return delta_rule(static_cast<const DeltaRule&>(mixer).shape, eps, w, h, p + "linear_attn.");
    case MixerKind::mamba2:
      return mamba(static_cast<const Mamba2&>(mixer).shape, eps, w, h, p + "mamba.");
    case MixerKind::kimi_delta:
      return channel_delta_rule(static_cast<const KimiDelta&>(mixer).shape, eps, w, h, a);
    case MixerKind::short_convolution:
      return short_convolution(static_cast<const ShortConvolution&>(mixer).shape, w, h, p + "conv.");
  }
  return {};
}

// The inputs of layers from the tokens and their embedded rows [n, M]: [n, L, P].
Tensor layer_inputs(const ModelShape& shape, const Weights& w, const Tensor& id, const Tensor& embedded) {
  const std::int64_t P = shape.layer_inputs.width;
  const auto by_layer = [&](const Tensor& x) { return x.view({x.size(0), shape.layers(), P}); };
  const Tensor found = w["model.embed_tokens_per_layer.weight"].index_select(0, id);
  const Tensor table = at::where(id.eq(shape.pad_token).unsqueeze(1), found.detach(), found);
  const Tensor context = at::matmul(embedded, w["model.per_layer_model_projection.weight"].t()) /
                         std::sqrt(static_cast<double>(shape.hidden));
  const Tensor normed = rms_norm(by_layer(context), w["model.per_layer_projection_norm.weight"], shape.rms_norm_eps);
  return (normed + by_layer(table) * std::sqrt(static_cast<double>(P))) / std::sqrt(2.0);
}

// The rows that the head reads, [n, M].
Tensor hidden_rows(const ModelShape& shape, const Weights& w, const Rollout& rollout, std::vector<Routing>& routings) {
  std::vector<std::int64_t> ids;
  for (std::int32_t d = 0; d < rollout.length(); ++d) ids.push_back(rollout.token_at(d));
  const Tensor id = at::tensor(ids, at::kLong);
  const Tensor found = w["model.embed_tokens.weight"].index_select(0, id);
  Tensor x = at::where(id.eq(shape.pad_token).unsqueeze(1), found.detach(), found) * shape.scales.embedding;
  const Tensor inputs = shape.layer_inputs.width > 0 ? layer_inputs(shape, w, id, x) : Tensor();
  Kept kept;
  for (std::int64_t l = 0; l < shape.layers(); ++l) {
    const LayerShape& layer = shape.at(l);
    const std::string p = "model.layers." + std::to_string(l) + ".";
    const auto before = [&](const char* name) {
      return layer.norm_place == NormPlace::after ? x : norm(shape, x, w, p + name);
    };
    const auto added = [&](const Tensor& rows, const char* name) {
      return (layer.norm_place == NormPlace::before ? rows : norm(shape, rows, w, p + name)) * shape.scales.residual;
    };
    x = x + added(mixed_rows(shape, *layer.mixer, w, before(shape.names.attention_norm), l, kept, p),
                  shape.names.attention_post_norm);
    if (layer.mlp == MlpKind::none) continue;
    const Tensor m = before(shape.names.mlp_norm);
    x = x + added(layer.has_experts() ? experts(shape, w, x, m, l, rollout, routings)
                                      : mlp_of(shape, m, w, p, shape.names.gate, shape.names.up, shape.names.down),
                  shape.names.mlp_post_norm);
    if (inputs.defined()) {
      const Tensor gate = activation(shape, at::matmul(x, w[p + "per_layer_input_gate.weight"].t()));
      x = x + norm(shape, at::matmul(gate * inputs.select(1, l), w[p + "per_layer_projection.weight"].t()), w,
                   p + "post_per_layer_input_norm");
    }
    x = x * layer.output_scale.value;
  }
  return norm(shape, x, w, shape.names.final_norm);
}

// log-softmax over the vocabulary of every row, [n, V].
Tensor log_probabilities(const ModelShape& shape, const Weights& w, const Rollout& rollout,
                         std::vector<Routing>& routings) {
  const Tensor x = hidden_rows(shape, w, rollout, routings);
  const Tensor& head = shape.tied_head ? w["model.embed_tokens.weight"] : w["lm_head.weight"];
  Tensor logits = at::matmul(x, head.t()) * shape.scales.logits;
  if (shape.scales.logit_cap > 0) logits = (logits / shape.scales.logit_cap).tanh() * shape.scales.logit_cap;
  return (logits / rollout.temperature).log_softmax(-1);
}

// Log-probs and entropies of the response tokens from log-softmax rows over the vocabulary [n, V], each over its kept
// set where it has one: log-softmax again, with the logits outside the set at -infinity.
std::pair<Tensor, Tensor> scores_of(const Tensor& rows, const Rollout& rollout) {
  const std::vector<std::int64_t> targets(rollout.response_ids.begin(), rollout.response_ids.end());
  Tensor all = rows, inside = at::ones_like(rows).detach();
  if (!rollout.kept_sets.empty()) {
    for (std::size_t t = 0; t < targets.size(); ++t) {
      const auto kept = rollout.kept_sets.at(t);
      if (kept.empty()) continue;
      inside[static_cast<std::int64_t>(t)].zero_();
      for (const std::int32_t id : kept) inside[static_cast<std::int64_t>(t)][id].fill_(1);
    }
    all = all.masked_fill(inside == 0, -INFINITY).log_softmax(-1).masked_fill(inside == 0, 0);
  }
  return {all.gather(1, at::tensor(targets, at::kLong).unsqueeze(1)).squeeze(1), -(all.exp() * all * inside).sum(1)};
}

Tensor series(const std::vector<double>& values, const Tensor& like) { return at::tensor(values, like.options()); }

Tensor ratio_of(const Tensor& lp, const Tensor& old) { return (lp - old).clamp(-20, 20).exp(); }

Tensor policy_loss(const Tensor& lp, const Tensor& old, const Tensor& advantage, const Tensor& mask, const Options& o) {
  if (o.policy_loss == "gpg" || o.policy_loss == "reinforce") return -advantage * lp;
  const double low = 1 - o.clip_ratio_low, high = 1 + o.clip_ratio_high;
  if (o.policy_loss == "cispo") return -ratio_of(lp, old).clamp(low, high).detach() * advantage * lp;
  if (o.policy_loss == "sapo") {
    const Tensor tau = at::where(advantage > 0, at::full_like(advantage, 1.0), at::full_like(advantage, 1.05));
    return -advantage * (tau * (ratio_of(lp, old) - 1)).sigmoid() * 4 / tau;
  }
  Tensor ratio = ratio_of(lp, old);
  if (o.policy_loss == "gspo") {
    const Tensor mean = ((lp - old) * mask).sum() / mask.sum().clamp_min(1);
    ratio = (lp - lp.detach() + mean.detach()).clamp_max(10).exp();
  }
  const Tensor clipped = at::maximum(-advantage * ratio, -advantage * ratio.clamp(low, high));
  if (o.policy_loss == "gspo") return clipped;
  return at::where(advantage < 0, at::minimum(clipped, -advantage * o.clip_ratio_c), clipped);
}

// k3 with verl's clamps.
Tensor kl_to_reference(const Tensor& lp, const Tensor& ref) {
  const Tensor x = (ref - lp).clamp(-20, 20);
  return (x.exp() - x - 1).clamp(-10, 10);
}

Tensor importance(const Rollout& rollout, const Tensor& old, const Tensor& mask, const Options& o) {
  if (o.rollout_is == "none") return at::ones_like(old);
  const Tensor log = old - series(rollout.rollout_logprobs, old);
  if (o.rollout_is == "token") return log.clamp(-20, 20).exp().clamp_max(o.rollout_is_threshold);
  return (log * mask).sum().clamp(-20, 20).exp().clamp_max(o.rollout_is_threshold).expand_as(old);
}

struct Totals {
  double tokens = 0, rollouts = 0, longest = 0;
};

Totals totals_of(std::span<const Rollout> batch) {
  Totals totals;
  totals.rollouts = static_cast<double>(batch.size());
  for (const Rollout& r : batch) {
    for (const auto m : r.loss_mask) totals.tokens += m;
    totals.longest = std::max(totals.longest, static_cast<double>(r.response_length()));
  }
  return totals;
}

Tensor gradient_of(const ParameterTable& table, const Weights& w, const Tensor& weights) {
  Tensor gradient = at::zeros_like(weights);
  for (const Parameter& p : table.parameters())
    if (const Tensor& g = w[p.name].grad(); g.defined()) gradient.narrow(0, p.offset, p.count).copy_(g.flatten());
  return gradient;
}

Tensor aggregate(const Tensor& loss, const Tensor& mask, const Totals& totals, const Options& o) {
  const std::string usual = o.policy_loss == "gspo" || o.policy_loss == "sapo" ? "seq-mean-token-mean" : "token-mean";
  const std::string mode = o.loss_agg_mode == Aggregation::of_the_loss ? usual : name_of(o.loss_agg_mode);
  const Tensor sum = (loss * mask).sum();
  if (mode == "token-sum") return sum;
  if (mode == "token-mean") return sum / std::max(totals.tokens, 1.0);
  if (mode == "seq-mean-token-sum") return sum / totals.rollouts;
  if (mode == "seq-mean-token-mean") return sum / (mask.sum() + 1e-8) / totals.rollouts;
  return sum / totals.rollouts / (o.loss_scale_factor > 0 ? o.loss_scale_factor : totals.longest);
}

// coef E sum_e f_e P_e of the tokens of some rollouts, layers summed.
Tensor balance(const ModelShape& shape, const std::vector<std::vector<Routing>>& rollouts) {
  Tensor total = at::zeros({}, rollouts[0][0].probability.options());
  for (std::size_t l = 0; l < rollouts[0].size(); ++l) {
    std::vector<Tensor> probability, chosen;
    for (const auto& layers : rollouts) {
      probability.push_back(layers[l].probability);
      chosen.push_back(layers[l].chosen);
    }
    const Tensor share = at::concat(chosen).mean(0) / static_cast<double>(shape.experts_per_token);
    total = total + static_cast<double>(shape.experts) * (share * at::concat(probability).mean(0)).sum();
  }
  return total;
}

// Every rollout on its own, all its tokens; adds the gradients of the router losses to the leaves.
void add_router_losses(const ModelShape& shape, const Weights& w, std::span<const Rollout> batch,
                       const Options& options, OracleResult& out) {
  std::vector<std::vector<Routing>> rollouts;
  for (const Rollout& rollout : batch) {
    rollouts.emplace_back();
    log_probabilities(shape, w, rollout, rollouts.back());
  }
  Tensor aux = at::zeros({}, rollouts[0][0].probability.options()), z = at::zeros_like(aux);
  if (options.router_aux_loss_scope == "minibatch")
    aux = balance(shape, rollouts);
  else
    for (const auto& layers : rollouts) aux = aux + balance(shape, {layers}) / static_cast<double>(batch.size());
  std::int64_t tokens = 0;
  for (const Rollout& rollout : batch) tokens += rollout.length();
  out.load.assign(shape.layer.size(), {});
  for (std::size_t i = 0; i < batch.size(); ++i) {
    for (const Routing& routing : rollouts[i]) {
      const Tensor square = routing.log_sum_exp.pow(2);
      z = z + (options.router_aux_loss_scope == "minibatch" ? square.sum() / static_cast<double>(tokens)
                                                            : square.mean() / static_cast<double>(batch.size()));
      auto& load = out.load[static_cast<std::size_t>(routing.layer)];
      load.resize(static_cast<std::size_t>(shape.experts));
      const Tensor counts = routing.chosen.sum(0);
      for (std::int64_t e = 0; e < shape.experts; ++e)
        load[static_cast<std::size_t>(e)] += static_cast<std::int64_t>(counts[e].item<double>());
    }
  }
  const Tensor loss = options.router_aux_loss_coef * aux + options.router_z_loss_coef * z;
  if (options.router_aux_loss_coef != 0) out.aux_loss = aux.item<double>();
  if (options.router_z_loss_coef != 0) out.z_loss = z.item<double>();
  out.loss += loss.item<double>();
  loss.backward();
}

Weights leaves_of(const ParameterTable& table, const Tensor& weights) {
  Weights w;
  for (const Parameter& p : table.parameters())
    w.by_name[p.name] = weights.narrow(0, p.offset, p.count).view(p.shape).clone().set_requires_grad(true);
  return w;
}

}  // namespace

void replace_delta_rule(Recurrence recurrence) { replaced_delta_rule = recurrence; }

RecordedExperts routes_of(const ModelShape& shape, const ParameterTable& table, const Tensor& weights,
                          const Rollout& rollout) {
  std::vector<Routing> layers;
  log_probabilities(shape, leaves_of(table, weights), rollout, layers);
  RecordedExperts out;
  out.tokens = rollout.length();
  out.layers = static_cast<std::int32_t>(layers.size());
  out.chosen = static_cast<std::int32_t>(shape.experts_per_token);
  for (std::int32_t t = 0; t < out.tokens; ++t)
    for (const Routing& layer : layers)
      for (std::int64_t e = 0; e < shape.experts; ++e)
        if (layer.chosen[t][e].item<double>() != 0) out.ids.push_back(static_cast<std::uint16_t>(e));
  return out;
}

OracleResult oracle(const ModelShape& shape, const ParameterTable& table, const Tensor& weights,
                    std::span<const Rollout> batch, std::span<const std::vector<double>> advantages,
                    const Options& options) {
  Weights w = leaves_of(table, weights);
  const Totals totals = totals_of(batch);
  OracleResult out;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Rollout& r = batch[i];
    out.logprobs.emplace_back();
    out.entropies.emplace_back();
    if (r.response_length() == 0) continue;
    std::vector<Routing> unused;
    const auto [lp, entropy] =
        scores_of(log_probabilities(shape, w, r, unused).slice(0, r.prompt_length() - 1, r.length() - 1), r);
    for (std::int64_t t = 0; t < lp.size(0); ++t) {
      out.logprobs.back().push_back(lp[t].item<double>());
      out.entropies.back().push_back(entropy[t].item<double>());
    }
    const Tensor mask = at::tensor(std::vector<double>(r.loss_mask.begin(), r.loss_mask.end()), lp.options());
    const Tensor old = r.old_logprobs.empty() ? lp.detach() : series(r.old_logprobs, lp);
    const Tensor advantage = series(advantages[i], lp);
    Tensor loss = aggregate(policy_loss(lp, old, advantage, mask, options) * importance(r, old, mask, options), mask,
                            totals, options);
    if (options.entropy_coeff != 0) loss = loss - options.entropy_coeff * aggregate(entropy, mask, totals, options);
    if (options.kl_loss_coef != 0)
      loss = loss +
             options.kl_loss_coef * aggregate(kl_to_reference(lp, series(r.ref_logprobs, lp)), mask, totals, options);
    out.loss += loss.item<double>();
    loss.backward();
  }
  if (options.router_aux_loss_coef != 0 || options.router_z_loss_coef != 0)
    add_router_losses(shape, w, batch, options, out);
  out.gradient = gradient_of(table, w, weights);
  return out;
}

OracleResult value_oracle(const ModelShape& shape, const ParameterTable& table, const Tensor& weights,
                          std::span<const Rollout> batch, std::span<const std::vector<double>> targets,
                          const Options& given) {
  Options options = given;
  options.policy_loss = "vanilla";  // the policy's loss says nothing about the critic's aggregation
  Weights w = leaves_of(table, weights);
  const Totals totals = totals_of(batch);
  OracleResult out;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    Rollout r = batch[i];
    r.recorded_experts = {};  // recorded experts are the policy's
    out.values.emplace_back();
    if (r.response_length() == 0) continue;
    std::vector<Routing> unused;
    const Tensor rows = hidden_rows(shape, w, r, unused).slice(0, r.prompt_length() - 1, r.length() - 1);
    const Tensor value = (at::matmul(rows, w["score.weight"].t()) + w["score.bias"]).squeeze(1);
    for (std::int64_t t = 0; t < value.size(0); ++t) out.values.back().push_back(value[t].item<double>());
    const Tensor mask = at::tensor(std::vector<double>(r.loss_mask.begin(), r.loss_mask.end()), value.options());
    const Tensor old = series(r.values, value), target = series(targets[i], value);
    const Tensor clipped =
        at::maximum(at::minimum(value, old + options.cliprange_value), old - options.cliprange_value);
    const Tensor square = at::maximum((value - target).pow(2), (clipped - target).pow(2));
    const Tensor loss = 0.5 * aggregate(square, mask, totals, options);
    out.loss += loss.item<double>();
    loss.backward();
  }
  out.gradient = gradient_of(table, w, weights);
  return out;
}

}  // namespace espalier::testing
