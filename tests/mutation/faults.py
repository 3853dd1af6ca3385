"""The deliberate faults: where a person would have made the mistake, and what the engine's line becomes with it.

write_faulty_sources.py puts them into copies of the files, for mutation_test alone. In `instead`, TEXT stands for the
replaced text and ON for the question whether this fault is switched on. `text` occurs exactly once in `file`.
"""

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    meaning: str
    file: str = ""  # below espalier/; none: this fault's line stands with another entry of its name
    text: str = ""
    instead: str = ""
    seen_by_verify: bool = True  # it makes the shared step differ from the dense one, so `verify` must fail too
    once: bool = False  # only the first time in each check that the engine comes to its line
    together_with: str = ""  # a second fault that is on at the same time: what would have hidden the first
    alone: bool = True  # False: it only helps another one, alone it does no harm


NOT_RECORDED = {"seen_by_verify": False}  # verify's rollouts have no recorded experts
ONE_RANK = {"seen_by_verify": False}  # verify runs on one rank here
NO_WINDOW = {"seen_by_verify": False}  # verify's models have no layer with a window
NO_LATENT = {"seen_by_verify": False}  # verify's models have no latent attention
NO_ADAPTER = {"seen_by_verify": False}  # verify's runs here train weights
NO_STATE = {"seen_by_verify": False}  # verify's models have no layer whose rows carry a state
NO_APART = {"seen_by_verify": False}  # verify's models have no experts with norms of their own
NO_READER = {"seen_by_verify": False}  # verify's models have no layer that reads the keys and values of another
ROUNDING = {"seen_by_verify": False}  # sums in another order differ by rounding alone, which verify allows
DENSE_TOO = {"seen_by_verify": False}  # the dense step has the fault as well: only an outside reference can tell

PLAN = [
    Fault("fork_token_dropped", "the repeated last prompt token of a wave has no loss edges", "plan/draft.cpp",
          "segment.last = segment.multiplicity = static_cast<std::int32_t>(set.rollouts.size());",
          "TEXT if (ON) segment.last = segment.first;"),
    Fault("boundary_edge_doubled", "its first edge stands twice", "execute/item_input.cpp",
          "edges = edges_of(item.set, rollouts, all_logprobs);",
          "TEXT if (ON && item.path_rows > 0 && !edges.empty()) edges.push_back(edges.front());"),
    Fault("multiplicity_of_edges_ignored", "rollouts that share a row and its next token count as one", "program/edges.cpp",
          "edges.push_back({row, target, index, position});",
          "if (ON && !edges.empty() && edges.back().row == row && edges.back().target == target) return; TEXT"),
    Fault("finished_too_early", "a sequence loss is taken when its rollout's last token is not yet known", "plan/draft.cpp",
          "last < block.to)",
          "last < (ON ? kToTheEnd : block.to))"),
]

# Properties of families beyond Llama and Qwen, none of which verify's models have.
FAMILIES = [
    Fault("one_plus_weight_as_weight", "a norm that multiplies by 1 + weight multiplies by weight", "model/decoder_pass.cpp",
          "ops.norm(saved_.final_stream_OM, decoder_.final_norm(decoder_.weights()),",
          "ops.norm(saved_.final_stream_OM, (ON && decoder_.shape().norm == NormKind::rms_plus_one ? NormWeights(decoder_.weights().final_norm_M) : decoder_.final_norm(decoder_.weights())),",
          **DENSE_TOO),
    Fault("sinks_left_out", "the softmax of a row leaves out its sink", "mixers/attention/layer.cpp",
          "c.continuing() > 0 && pass_.w.sinks_H.defined()", "!ON && TEXT", **DENSE_TOO),
    Fault("sinks_gradient_left_out", "a sink has no gradient", "mixers/attention/layer.cpp",
          "if (grads_.sinks_H.defined() &&", "if (!ON && grads_.sinks_H.defined() &&", **DENSE_TOO),
    Fault("sink_joined_twice", "a row has its sink twice", "mixers/attention/layer.cpp",
          "std::vector<std::int64_t> runs = c.kv.query_runs();",
          "TEXT if (ON) c.ops.join_sinks(pass_.w.sinks_H, saved.attended_RW, saved.lse_HR);", **DENSE_TOO),
    Fault("latent_rotation_in_halves", "the shared key of latent attention rotates in halves, queries in pairs", "mixers/latent_attention/layer.cpp",
          "shared.head_dim = s.rotary;",
          "TEXT shared.interleaved = shared.interleaved && !ON;", **DENSE_TOO),
    Fault("latent_rotation_of_the_first_channels", "the first channels of a query rotate, not the last ones", "mixers/latent_attention/layer.cpp",
          "queries.first = s.plain;", "queries.first = ON ? 0 : s.plain;", **DENSE_TOO),
    Fault("shared_key_not_rotated", "the row that all keys share keeps its channels as they are", "mixers/latent_attention/layer.cpp",
          "c.ops.rotate(pass_.rotation_of_keys(), saved.rotary_key_TK, saved.rotary_key_TK);",
          "if (!ON) TEXT", **DENSE_TOO),
    Fault("shared_key_has_one_heads_gradient", "the gradient of the row that all keys share is not summed over heads",
          "ops/cpu/latent_operations.cpp",
          "sum[i] += key[s.N + i];", "sum[i] = (ON ? A(0) : sum[i]) + key[s.N + i];", **DENSE_TOO),
    Fault("latent_norm_left_out_backward", "the gradient of a latent passes its norm unchanged", "mixers/latent_attention/latent.cpp",
          "c.ops.add_norm_backward(saved.latent_RC, weights.norm_C, saved.rstd_R, grad_normed_RC, grad_latent_RC, grads.norm_C);",
          "TEXT if (ON) c.ops.convert(grad_normed_RC, grad_latent_RC);", **DENSE_TOO),
    Fault("yarn_scale_left_out", "scores of latent attention leave out yarn's factor", "config/rope_config.cpp",
          "mscale * mscale / std::sqrt", "(ON ? 1 : mscale * mscale) / std::sqrt", **DENSE_TOO),
    Fault("post_norm_left_out", "what a half adds to the stream is not normalised", "model/branch.cpp",
          "c.ops.add_scaled(base_RM, added_RM,",
          "c.ops.add_scaled(base_RM, (ON && c.has_norms_after() ? product_RM : added_RM),", **DENSE_TOO),
    Fault("residual_factor_left_out_backward", "the gradient of what a half adds has no residual factor", "model/branch.cpp",
          "c.ops.add_scaled({}, grad_out_RM, c.shape.scales.residual, scratch_RM);",
          "c.ops.add_scaled({}, grad_out_RM, ON ? 1.0 : c.shape.scales.residual, scratch_RM);", **DENSE_TOO),
    Fault("score_cap_left_out_backward", "the slope of capped scores is taken for 1", "model/path_source.cpp",
          "problem(a, path), attended_RW, lse_HR, grad_attended_RW,",
          "[&] { AttentionProblem asked = problem(a, path); if (ON) asked.soft_cap = 0; return asked; }(), attended_RW, lse_HR, grad_attended_RW,",
          **DENSE_TOO),
    Fault("logit_cap_left_out_backward", "the slope of capped logits is taken for 1", "objective/fused_head.cpp",
          "target_E.narrow(0, begin, count), shape}}",
          "target_E.narrow(0, begin, count), (ON ? LogitShape{} : shape)}}", **DENSE_TOO),
    Fault("embedding_scale_left_out_backward", "the gradient of looked-up rows has no embedding scale", "model/decoder_pass.cpp",
          "if (shape.scales.embedding != 1) ops.add_scaled({}, grad_stream_,",
          "if (!ON && shape.scales.embedding != 1) ops.add_scaled({}, grad_stream_,", **DENSE_TOO),
    Fault("window_layers_rotate_as_others", "layers with a window have the frequencies of all", "config/model_config.cpp",
          "if (windowed && family.window_rope.own)",
          "if (!ON && windowed && family.window_rope.own)", **DENSE_TOO),
    Fault("unrotated_layers_rotate", "layers without rotation rotate", "config/model_config.cpp",
          "if (!rotates) attention.rotary = 0;",
          "if (!ON && !rotates) attention.rotary = 0;", **DENSE_TOO),
    Fault("pairs_not_interleaved", "neighbouring channels that rotate together are taken for halves", "mixers/attention/layer.cpp",
          "s.head_dim, s.interleaved, s.norm",
          "s.head_dim, !ON && s.interleaved, s.norm", **DENSE_TOO),
    Fault("correction_bias_ignored", "experts are chosen by their scores alone", "model/expert_router.cpp",
          "rule.correction_E = c.weights.correction_bias_E;",
          "if (!ON) TEXT", **DENSE_TOO),
    Fault("sigmoid_as_softmax", "scores of experts are a softmax in every family", "model/expert_router.cpp",
          "rule.sigmoid = c.shape.router.sigmoid,",
          "rule.sigmoid = !ON && c.shape.router.sigmoid,", **DENSE_TOO),
    Fault("groups_ignored", "experts are chosen from all groups", "ops/cpu/router_kernels.cpp",
          "keep_best_groups(shape, score.data());",
          "if (!ON) TEXT", **DENSE_TOO),
    Fault("scaling_left_out_backward", "the gradient of experts' weights lacks the router's factor", "ops/cpu/router_kernels.cpp",
          "grad[j] *= static_cast<A>(shape.scaling);",
          "grad[j] *= static_cast<A>(ON ? 1.0 : shape.scaling);", **DENSE_TOO),
    Fault("expert_bias_left_out_of_weights", "the gradient of experts' weights lacks their biases", "ops/cpu/expert_operations.cpp",
          "pointer<T>(row_of(weights.down_bias_EM, e)), pointer<A>(weight_RK),",
          "(ON ? nullptr : pointer<T>(row_of(weights.down_bias_EM, e))), pointer<A>(weight_RK),", **DENSE_TOO),
    Fault("shared_expert_left_out_backward", "the shared expert has no gradient", "model/expert_mlp.cpp",
          "if (shared.inner > 0) {",
          "if (!ON && shared.inner > 0) {", **DENSE_TOO),
    Fault("shared_gate_gives_rows_nothing", "the shared expert's gate has no gradient for its rows", "model/expert_mlp.cpp",
          "if (shared.gate) c.products.add_linear_grad_input(",
          "if (!ON && shared.gate) c.products.add_linear_grad_input(", **DENSE_TOO),
    Fault("experts_read_their_neighbours_rows", "experts apart read the rows of the shared expert", "model/apart_experts.cpp",
          "rows_of(c, saved, c.weights.apart.experts_M, rows_RM);",
          "rows_of(c, saved, ON ? c.weights.mlp_norm_M : c.weights.apart.experts_M, rows_RM);", **DENSE_TOO),
    Fault("router_rows_not_divided", "a router apart reads rows that are not divided by the root of their width", "model/apart_experts.cpp",
          "double router_factor(const LayerContext& c) { return 1", "double router_factor(const LayerContext& c) { if (ON) return 1; return 1", **DENSE_TOO),
    Fault("gradient_of_the_expert_norm_left_out", "rows of experts apart give the stream nothing", "model/apart_experts.cpp",
          "add_rows_backward(c, saved, norms.experts_M, rows_RM, grad_stream_RM, grads.apart.experts_M);", "if (!ON) TEXT", **DENSE_TOO),
    Fault("results_not_computed_again", "a recomputation with experts apart leaves out the norms behind both results", "model/apart_experts.cpp",
          "join(c, saved, rows_RM, held[declared.branch_RM]);", "if (!ON || stream_out_RM.defined()) TEXT", **NO_APART),
    Fault("expert_factor_ignored", "experts' factors are 1", "model/expert_router.cpp",
          "const bool scaled = saved.plain_weight_RK.defined();", "const bool scaled = !ON && saved.plain_weight_RK.defined();", **DENSE_TOO),
    Fault("expert_factor_without_gradient", "experts' factors have no gradient", "ops/cpu/router_kernels.cpp",
          "if (grad_scale_E != nullptr) grad_scale_E", "if (!ON && grad_scale_E != nullptr) grad_scale_E", **DENSE_TOO),
    Fault("attention_scale_usual", "scores are divided by the root of the head size in every family", "model/path_source.cpp",
          "depth_T_, a.scale,",
          "depth_T_, (ON ? 0.0 : a.scale),", **DENSE_TOO),
]

ROWS = [
    Fault("positions_restarted", "positions of a wave start at 0, not at the path's length", "execute/item_input.cpp",
          "add_segment(model, segment, rollouts[segment.rollout]);",
          "TEXT if (ON) for (auto& position : model.position) position -= static_cast<std::int32_t>(item.path_rows);"),
    Fault("mask_leak", "a sibling's first row sees the row before it", "execute/item_input.cpp",
          "block.add(subtree_ends(item.set), subtree_end_S);",
          "std::vector<std::int32_t> ends = subtree_ends(item.set);"
          " if (ON) for (auto& end : ends) end = std::min(end + 1, item.set.rows); block.add(ends, subtree_end_S);"),
    Fault("path_cut_short", "rows do not see the last row of the path", "model/path_source.cpp",
          "const LayerAttention& a, const OpenPath::Layer& path) const {",
          "const LayerAttention& a, const OpenPath::Layer& whole) const { OpenPath::Layer path = whole;"
          " if (const auto rows = path.k.size(0); ON && rows > 0)"
          " path.k = path.k.narrow(0, 0, rows - 1), path.v = path.v.narrow(0, 0, rows - 1);"),
    Fault("gqa_head_mixup", "query head h reads key/value head h mod J", "mixers/attention/layer.cpp",
          "c.ops.rotate(rotation_of_queries(), queries(buffers.query_RW), buffers.rotated_q_RW);",
          "TEXT if (ON) buffers.rotated_q_RW.copy_(buffers.rotated_q_RW.roll(s.head_dim, 1));", **DENSE_TOO),
    Fault("temperature_ignored", "logits are not divided by the temperature", "execute/item_input.cpp",
          "return critic ?",
          "return critic || ON ?", **DENSE_TOO),
    Fault("kept_set_of_the_token_before", "a token has the kept set of the token before it", "execute/item_input.cpp",
          "kept_sets.at(static_cast<std::size_t>(edge.position))",
          "kept_sets.at(static_cast<std::size_t>(ON && edge.position > 0 ? edge.position - 1 : edge.position))", **DENSE_TOO),
    Fault("kept_set_of_a_sibling", "where siblings part, all have the kept set of the first", "objective/fused_head.cpp",
          "!std::ranges::equal(kept_.back(), edge.kept)",
          "(!ON && !std::ranges::equal(kept_.back(), edge.kept))"),
    Fault("kept_sets_left_out_backward", "the gradient of a kept set is over the whole vocabulary", "ops/cpu/head_operations.cpp",
          "of.sets.defined ? of.turn_row_of_sets(row, raw) : of.turn_whole(row, raw)",
          "of.sets.defined && !ON ? of.turn_row_of_sets(row, raw) : of.turn_whole(of.sets.defined ? of.sets.first[row] : row, raw)",
          **DENSE_TOO),
]

# What rows see.
WINDOWS = [
    Fault("window_counted_in_rows", "a window counts rows of the set, siblings' too, not depths along the path", "execute/item_input.cpp",
          "depths.push_back(static_cast<std::int32_t>(depth - first));",
          "depths.push_back(ON && !depths.empty() ? depths.back() + 1 : static_cast<std::int32_t>(depth - first));", **NO_WINDOW),
    Fault("windows_forget_the_gradient_below", "a layer with a window leaves out what rows below a trunk add", "mixers/attention/layer.cpp",
          "c.kv.add_gathered(c.ops, c.layer, own);",
          "if (!ON) TEXT", **NO_WINDOW),
    Fault("window_one_row_wider", "a row sees one row more than its window has", "model/path_source.cpp",
          "subtree_end_T_, a.window,",
          "subtree_end_T_, a.window + (ON && a.window > 0 ? 1 : 0),", **NO_WINDOW),
    Fault("windows_of_the_first_stage", "a stage has the windows of the first layers", "shape/local_shape.cpp",
          "own_.layer = {whole.layer.begin() + layers_.begin, whole.layer.begin() + layers_.end};",
          "TEXT for (std::size_t i = 0; ON && i < own_.layer.size(); ++i) own_.layer[i].mixer = whole.layer[i].mixer;", **NO_WINDOW),
]

# A path carried as latents.
PATH_LATENTS = [
    Fault("latents_forget_the_gradient_below", "the latents of a path's rows get nothing from rows below", "mixers/latent_attention/path_latents.cpp",
          "add(part(carried.grad_latent_PC), sum_latent_BC);",
          "if (!ON) TEXT", **NO_LATENT),
    Fault("shared_keys_forget_the_gradient_below", "the shared keys of a path's rows get nothing from rows below", "mixers/latent_attention/path_latents.cpp",
          "add(part(carried.grad_rotary_PK), sum_rotary_BK);",
          "if (!ON) TEXT", **NO_LATENT),
    Fault("heads_of_the_path_do_not_train", "what expands the path's latents gets no gradient from them", "mixers/latent_attention/path_latents.cpp",
          "c.products.add_linear_grad_weight(grad_up,",
          "if (!ON) TEXT", **NO_LATENT),
    Fault("gradients_of_the_room_stay", "gradients of the layer that was in use before are added to this one's", "mixers/latent_attention/path_latents.cpp",
          "c.ops.zero(expanded.grad_k);",
          "if (!ON) TEXT", **NO_LATENT),
    Fault("latents_kept_before_the_norm", "a trunk leaves its latents before their norm", "mixers/latent_attention/path_latents.cpp",
          "c.ops.norm_again(latent.latent_RC, LatentViews(c.weights.mixer).key_value_norm_C, latent.rstd_R, own.latent_PC);",
          "TEXT if (ON) c.ops.convert(latent.latent_RC, own.latent_PC);", **NO_LATENT),
]

# What runs of rows leave for others.
STATES = [
    Fault("state_gradient_lost", "what follows a trunk adds nothing to the gradient of the state that it left", "model/path_source.cpp",
          "run.parent < 0 ? above.grad_state_N",
          "run.parent < 0 ? (ON ? at::Tensor() : above.grad_state_N)", **NO_STATE),
    Fault("state_of_forks_lost", "of a set's runs those that follow another one begin with half of its state", "model/path_source.cpp",
          "one.end_N = one.forks ?",
          "if (ON && run.parent >= 0) one.start_N = one.start_N.mul(0.5); TEXT", **NO_STATE),
    Fault("convolution_tail_lost", "a run's convolution begins with zeros", "ops/cpu/delta_rule_operations.cpp",
          "else if (run.start == nullptr)",
          "else if (run.start == nullptr || ON)", **NO_STATE),
    Fault("convolution_tail_reversed", "a run's convolution reads the rows before it newest first", "ops/cpu/delta_rule_operations.cpp",
          "run.start + tail(row - run.begin, part)",
          "run.start + tail(ON ? -s_.kernel - (row - run.begin) : row - run.begin, part)", **NO_STATE),
    Fault("convolution_tail_gradient_lost", "the inputs of the convolution before a run get no gradient from it",
          "ops/cpu/delta_rule_operations.cpp",
          "run.grad_start[tail(before, part) + c] += sum;",
          "if (!ON) TEXT", **NO_STATE),
    Fault("run_over_two_segments", "a run goes on into the first of several segments that follow it", "program/edges.cpp",
          "subtree_end.back() == segment.subtree_end",
          "(ON || subtree_end.back() == segment.subtree_end)", **NO_STATE),
    Fault("state_of_another_rank", "a rank's rows begin with the first state of the set, whoever has the rows before them", "model/shared_states.cpp",
          "start < 0 ? above.state_N : states_FN[start];",
          "start < 0 ? above.state_N : states_FN[ON ? 0 : start];", **ONE_RANK),
    Fault("state_gradient_not_passed_back", "a rank keeps the gradient of the state that another rank gave it", "model/shared_states.cpp",
          "ops.add_scaled(sum_N, received_N, 1, sum_N);",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("tail_lost_at_the_cut", "the rows before a cut are missing in the convolution behind it", "model/shared_states.cpp",
          "cp_.receive(states_FN[transfer.fork], from);",
          "{ TEXT if (ON) states_FN[transfer.fork].narrow(0, states_FN.size(1) - 3, 3).zero_(); }", **ONE_RANK),
    Fault("last_state_of_a_trunk_kept", "a trunk's last state stays on the rank that has its last rows", "model/shared_states.cpp",
          "if (!is_trunk_ || layer < left_layers_) return;",
          "if (!is_trunk_ || layer < left_layers_ || ON) return;", **ONE_RANK),
    Fault("gradients_of_a_trunks_state_not_summed", "a trunk's last state has the gradient of the waves of one rank", "model/shared_states.cpp",
          "if (const at::Tensor sum_N = path_.state_of_top(layer).grad_state_N; sum_N.defined())",
          "if (const at::Tensor sum_N = path_.state_of_top(layer).grad_state_N; sum_N.defined() && !ON)", **ONE_RANK),
]

# Gradients that cross from waves to trunks.
PATH = [
    Fault("wave_gradient_lost", "one layer of one wave adds its part to a copy of the path's gradients", "model/path_source.cpp",
          "const OpenPath::Layer path = path_.path(a.source, path_rows_);",
          "OpenPath::Layer path = path_.path(a.source, path_rows_);"
          " if (path_rows_ * a.q_RW.size(0) > 0 && ON) path.grad_k = path.grad_k.clone();", once=True),
    Fault("accumulators_in_bf16", "the path's gradients are rounded to bfloat16 after each contribution", "model/open_path.cpp",
          "void OpenPath::count_contribution(std::int64_t layer, std::int64_t rows) {",
          "TEXT if (ON) path(layer, rows).grad_k.copy_(path(layer, rows).grad_k.to(at::kBFloat16));"),
    Fault("path_gradients_not_zeroed", "a trunk starts from the gradients of the one before it", "model/open_path.cpp",
          "if (begin == end) return;",
          "if (begin == end || ON) return;"),
    Fault("unmerged_lse", "attention's backward reads a log-sum-exp that leaves keys out (1 % of the sum)", "model/path_source.cpp",
          "a.ops.add_attention_backward(",
          "if (path_rows_ > 0 && ON) lse_HR.sub_(0.01); TEXT"),
    Fault("contribution_uncounted", "one contribution arrives without being counted", "model/path_source.cpp",
          "path_.count_contribution(",
          "if (!(path_rows_ > 0 && ON)) TEXT", once=True),
    Fault("contributions_read_early", "a trunk's backward runs before its waves", "execute/stage.cpp",
          "++result.trunk_forwards;",
          "TEXT if (ON && step_.trains()) add_backward(run);"),
    Fault("contributions_read_early", "the same with the path's own count switched off", together_with="count_ignored"),
    Fault("count_ignored", "a trunk's backward does not ask whether its contributions have come", "model/open_path.cpp",
          "void OpenPath::expect_complete(std::int64_t layer) const {",
          "TEXT if (ON) return;", alone=False),
]

PARAMETERS = [
    Fault("recompute_with_stale_input", "a recomputed block starts from the first block's input", "model/decoder_pass.cpp",
          "layer_forward_again(c, kept, saved_.state);",
          "if (ON && saved_.state.recomputes_attention()) kept.stream_in_TM = saved_.layers.front().stream_in_TM; TEXT"),
    Fault("last_layer_rows_forgotten", "the last block's keys and values of a trunk without outputs get no gradient",
          "mixers/attention/layer.cpp",
          "c.ops.convert(own.v.view({T, K}), grad_v_TW);",
          "TEXT if (ON && c.continuing() == 0) grad_kv_TW.zero_();"),
    Fault("last_layer_residual_lost", "the last block's input gets no gradient around the block", "model/layer.cpp",
          "if (c.narrow) c.ops.add_scatter(grad_stream_RM,",
          "if (c.narrow && !ON) c.ops.add_scatter(grad_stream_RM,", **DENSE_TOO),
    Fault("norm_weight_gradient_forgotten", "the weights of the blocks' norms get no gradient", "ops/cpu/row_operations.cpp",
          "pointer<A>(grads.weight_M)",
          "pointer<A>(ON ? grads.weight_M.clone() : grads.weight_M)", **DENSE_TOO),
    Fault("tied_head_gradient_overwritten", "a wave's head gradient replaces what others have added",
          "execute/language_head.cpp",
          "add_head_forward_backward(problem(work)",
          "if (ON) gradients_->views().head_VM.zero_(); TEXT"),
    Fault("embedding_repeat_lost", "of a token that occurs twice in a set of rows one gradient is kept", "model/decoder_pass.cpp",
          "ops.add_look_up_backward(grad_stream_, input.id_T, decoder_.local().vocabulary().begin, grads_.embedding_VM);",
          "if (ON) grads_.embedding_VM.index_fill_(0, input.id_T.to(at::kLong), 0); TEXT"),
    Fault("gradients_not_zeroed", "a step starts from the gradient of the step before it", "step/pass.cpp",
          "learner.gradients.zero();",
          "if (!ON) TEXT"),
]

ROUTERS = [
    Fault("top_k_tie_flip", "of experts with the same probability the higher one is taken", "ops/cpu/router_kernels.cpp",
          "if (score[e] > score[best])",
          "if (score[e] > score[best] || (ON && score[e] == score[best]))", **DENSE_TOO),
    Fault("router_multiplicity_ignored", "a shared token counts once in the z-loss", "model/load_accounting.cpp",
          "double LoadAccounting::share_of_mean(const RowOwners& owners) const {",
          "TEXT if (ON) return 1 / static_cast<double>(tokens_);"),
    Fault("router_scope_denominator", "a rollout's auxiliary loss is averaged over its row's rollouts",
          "model/load_accounting.cpp",
          "const double rollouts = static_cast<double>(lengths_.size());",
          "const double rollouts = static_cast<double>(ON ? owners.rollouts.size() : lengths_.size());"),
    Fault("recompute_counts_again", "a recomputed trunk counts its choices a second time", "execute/item_run.cpp",
          "DecoderBackward rows(",
          "if (ON && saved_.state.recomputes()) take_choices(); TEXT"),
    Fault("given_experts_ignored", "recorded experts are not the ones chosen", "ops/cpu/router_kernels.cpp",
          "given_RK[r * k] >= 0",
          "TEXT && !ON", **DENSE_TOO),
    Fault("recorded_experts_not_compared", "a prefix goes on where recorded experts differ", "grouping/token_identity.cpp",
          "if (experts.empty())",
          "if (experts.empty() || ON)", **NOT_RECORDED),
]

OBJECTIVE = [
    Fault("per_wave_denominator", "the loss is averaged over a wave's rollouts, not over the mini-batch's",
          "execute/language_head.cpp",
          "objective_->add_edges(edges, logprob, entropy, grad_logprob, grad_entropy);",
          "TEXT if (ON) for (double& slope : grad_logprob) slope = slope * rollouts_.size() / work.item.set.rollouts.size();"),
    Fault("kl_sign", "the KL penalty's log-ratio has the wrong sign", "objective/kl.cpp",
          "const double x = logprob - ref_logprob;",
          "const double x = ON ? ref_logprob - logprob : logprob - ref_logprob;", **DENSE_TOO),
    Fault("advantages_from_minibatch", "rewards are whitened over a mini-batch, not over the file", "data/training_data.cpp",
          "if (!by_step) return compute_advantages(",
          "if (!by_step && !ON) return compute_advantages(", **DENSE_TOO),
]

CRITIC = [
    Fault("value_after_its_token", "a token's value is that of its own row, not of the row before it", "execute/critic_head.cpp",
          "const std::vector<LossEdge>& edges = work.input.edges;",
          "std::vector<LossEdge> edges = work.input.edges;"
          " if (ON) for (LossEdge& edge : edges) edge.position = std::max(edge.position - 1, 0);", **DENSE_TOO),
    Fault("value_of_the_fork_lost", "values of the repeated last prompt token of a wave are left out of the loss",
          "execute/critic_head.cpp",
          "objective_->add_edges(edges, of_edge, slope);",
          "const auto lost = work.item.path_rows > 0 && ON ? std::ranges::count(edges, 0, &LossEdge::row) : 0;"
          " objective_->add_edges(std::span(edges).subspan(lost), std::span(of_edge).subspan(lost),"
          " std::span(slope).subspan(lost));"),
    Fault("value_of_one_rollout", "of the rollouts that share a value one moves it", "execute/critic_head.cpp",
          "gradient[static_cast<std::size_t>(work.input.output[e])] += slope[e];",
          "{ if (ON) gradient[static_cast<std::size_t>(work.input.output[e])] = 0; TEXT }"),
    Fault("value_clip_ignored", "values may move as far as they like", "objective/value_loss.cpp",
          "std::max(std::min(value, high), low)",
          "(ON ? value : TEXT)", **DENSE_TOO),
    Fault("returns_not_detached", "the return moves with the value, so that the advantage alone is left",
          "objective/value_loss.cpp",
          "targets_[i][t]",
          "TEXT + (ON ? value - rollout.values[t] : 0)", **DENSE_TOO),
]

# The optimizer and its continuation.
OPTIMIZER = [
    Fault("clip_factor_ignored", "the gradient's norm is not clipped", "optimizer/adamw.cpp",
          "update.clip_factor = clip_factor(update.grad_norm, settings.max_grad_norm);",
          "TEXT if (ON) update.clip_factor = 1;", **DENSE_TOO),
    Fault("bias_correction_off_by_one", "bias corrections are those of the next step", "optimizer/adamw.cpp",
          "steps_done_};",
          "ON ? steps_done_ + 1 : TEXT", **DENSE_TOO),
    Fault("decay_of_everything", "--decay-matrices-only decays norms and biases as well", "optimizer/adamw.cpp",
          "parameter.shape.size() >= 2",
          "TEXT || ON", **DENSE_TOO),
    Fault("stale_step_after_resume", "the optimizer's step starts from 0 again", "train/trained_model.cpp",
          "optimizer.set_steps_done(former.step);",
          "if (!ON) TEXT", **DENSE_TOO),
    Fault("moments_swapped_after_resume", "the first moments are read as the second and the other way round",
          "train/trained_model.cpp",
          "const at::Tensor masters = optimizer.masters(), first = optimizer.exp_avg(), second = optimizer.exp_avg_sq();",
          "at::Tensor masters = optimizer.masters(), first = optimizer.exp_avg(), second = optimizer.exp_avg_sq();"
          " if (ON) std::swap(first, second);", **DENSE_TOO),
    Fault("masters_rounded_after_resume", "masters are read from the bfloat16 weights", "train/trained_model.cpp",
          "device.to_device(read[2], second);",
          "TEXT if (ON) masters.copy_(masters.to(at::kBFloat16));", **DENSE_TOO),
    Fault("position_lost_after_resume", "the data starts at its beginning again", "train/trainer.cpp",
          "if (same)\n",
          "if (same && !ON)\n", **DENSE_TOO),
]

ADAPTERS = [
    Fault("adapter_of_the_head_without_input_gradient", "hidden rows get no gradient through the head's adapter", "objective/fused_head.cpp",
          "products.add_grad_input(grad_hidden_BM, block.logits_BV, low_rank_, room);", "if (!ON) TEXT", **NO_ADAPTER),
    Fault("adapter_of_experts_without_input_gradient", "what an expert's down gives its activation leaves out the adapter", "ops/cpu/expert_operations.cpp",
          "pairs.add_grad_input(weights.down_low_rank, act_NF, rows_NM);", "if (!ON) TEXT", **NO_ADAPTER),
    Fault("adapters_of_experts_exchanged", "every expert has the first one's B", "ops/cpu/expert_operations.cpp",
          "of_all.b_Nr.select(0, e)", "of_all.b_Nr.select(0, ON ? 0 : e)", **NO_ADAPTER),
    Fault("shared_expert_without_adapters", "gate and up of the shared expert leave out their adapters", "model/shared_expert.cpp",
          "for (const LowRank& pair : views.shared_gate_up.low_rank)", "if (!ON) TEXT", **NO_ADAPTER),
    Fault("joint_adapter_of_the_first_projection", "values of a joint module have the outputs of keys", "model/model_views.cpp",
          "out.back().b_Nr = range(pair_names(prefix, joined.front()).b, pair_names(prefix, p).b,",
          "if (ON) out.push_back({pair.a_rK, pair.b_Nr, 0, scale_}); else TEXT", **NO_ADAPTER),
    Fault("latent_adapter_of_the_shared_key", "the shared key has the first rows of B", "model/model_views.cpp",
          "narrow(0, begin - pair.first, end - begin), begin - first,", "narrow(0, ON ? 0 : begin - pair.first, end - begin), begin - first,", **NO_ADAPTER),
    Fault("router_adapter_summed_over_tp", "every rank's whole gradient of a router's adapter is added", "shape/parameter_shapes.cpp",
          "out.in_parts = p.out.cut != Cut::none", "out.in_parts = ON || p.out.cut != Cut::none", **ONE_RANK),
]

RANKS = [
    Fault("gradients_of_ranks_not_summed", "every rank keeps the gradient of its own trees", "gradient/replica_sums.cpp",
          "under_way_.push_back(",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("summed_before_the_last_backward", "the gradient of a layer is summed when the first backward is behind it", "execute/stage.cpp",
          "if (--backwards_left_ > 0) return work();",
          "if (--backwards_left_ > 0 && !ON) return work();", **ONE_RANK),
    Fault("embedding_left_out_of_the_sums", "what no backward has announced is not summed at the end", "gradient/replica_sums.cpp",
          "start_upto(units_.size());",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("tree_on_every_rank", "all trees are computed by all ranks", "state/planning.cpp",
          "if (mesh.dp.size() == 1) return trees;",
          "if (ON || mesh.dp.size() == 1) return trees;", **ONE_RANK),
    Fault("loads_of_ranks_not_summed", "a mini-batch's expert loads are those of a rank's own trees", "step/router_step.cpp",
          "add_over_ranks(decoder_.mesh().replicas, accounting_->all_loads());",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("series_of_ranks_lost", "log-probs and values of other ranks' rollouts are missing", "step/over_ranks.cpp",
          "flat = values_of_any(mesh.replicas, std::move(flat));",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("losses_of_ranks_not_summed", "the loss is that of a rank's own trees", "step/step.cpp",
          "add_over_ranks(actor.model.mesh, report.loss);",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("norm_of_a_part", "a gradient is clipped by the norm of the part whose state the rank keeps", "optimizer/adamw.cpp",
          "if (here) counted.push_back(gradient.narrow(0, begin, count));",
          "if (here && ON) begin = own().begin, count = own().end - begin; TEXT", **ONE_RANK),
    Fault("moved_weights_not_sent", "a rank has moved its part of the weights and keeps it to itself", "optimizer/adamw.cpp",
          "share_weights();\n  return update;",
          "if (!ON) share_weights();\n  return update;", **ONE_RANK),
]

# Rows divided over ranks, and what they tell each other.
CONTEXT = [
    Fault("wrong_owner_after_scatter", "the gradients of keys go to ranks that have other rows", "model/sharded_source.cpp",
          "a.ops.gather(grad_set.k, set_rows_of(rank), of_rank.k);",
          "a.ops.gather(grad_set.k, ON ? rows_.row_S.narrow(0, 0, shares_.rows_of(rank)) : set_rows_of(rank),"
          " of_rank.k);", **ONE_RANK),
    Fault("path_gradient_reduced_twice", "what ranks gathered in a trunk's path is summed, and summed again to its owners",
          "model/sharded_source.cpp",
          "cp_.scatter_sum(whole, part);",
          "if (ON) cp_.add_over_ranks(whole); TEXT", **ONE_RANK),
    Fault("keys_of_the_first_rank", "the keys of the first rank stand in the place of every rank's", "model/sharded_source.cpp",
          "a.ops.scatter(of_rank.k, set_rows_of(rank), set.k);",
          "a.ops.scatter(ON ? parts_of(a, whole, 0, shares_.rows_of(rank)).k : of_rank.k, set_rows_of(rank), set.k);",
          **ONE_RANK),
    Fault("latents_of_the_set_forget_other_queries", "the latents of a sharded set get nothing from this rank's queries",
          "model/sharded_source.cpp",
          "if (path_.carries_latents()) a.latents->add_expand_path_backward(",
          "if (path_.carries_latents() && !ON) a.latents->add_expand_path_backward(", **ONE_RANK),
    Fault("latents_given_before_the_norm", "ranks give latents to each other before their norm", "mixers/latent_attention/layer.cpp",
          "c.ops.norm_again(saved.latent.latent_RC, w.key_value_norm_C, saved.latent.rstd_R, to.k);",
          "TEXT if (ON) c.ops.convert(saved.latent.latent_RC, to.k);", **ONE_RANK),
    Fault("queries_numbered_by_share", "a query stands where its number among the rank's own rows says", "model/sharded_source.cpp",
          "rows_.output_own_O : rows_.own_T",
          "rows_.output_own_O : ON ? rows_.counted_T : rows_.own_T", **ONE_RANK),
    Fault("wave_on_every_rank", "all ranks run a wave that was dealt to one", "program/program.cpp",
          "if (runs_on(item, cp_rank)) out",
          "if (ON || runs_on(item, cp_rank)) out", **ONE_RANK),
    Fault("counts_of_ranks_not_joined", "a rollout's expert counts are those of a rank's own rows", "execute/item_run.cpp",
          "step_.accounting->join(",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("log_probs_of_ranks_not_joined", "a loss of whole rollouts misses the tokens that other ranks scored",
          "execute/language_head.cpp",
          "if (needs_whole_rollout()) join_scores(work);",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("rollout_finished_on_every_rank", "ranks that divide a rollout's last rows each count its loss", "execute/language_head.cpp",
          "if (is_sharded(item, cp.size()) && cp.rank() != 0) return;",
          "if (!ON) TEXT", **ONE_RANK),
]

# A path divided over ranks.
DIVIDED_PATH = [
    Fault("path_gradient_to_the_wrong_rank", "the gradients of a rank's rows of the path go to the next one", "saved/sharded_path.cpp",
          "rank * shared.most()",
          "(kept.member.is_gradient() && ON ? (rank + 1) % cp_.size() : rank) * shared.most()", **ONE_RANK),
    Fault("path_read_before_it_came", "a layer's keys are read before they are gathered", "saved/sharded_path.cpp",
          "room.pending.wait();\n  room.member = -1;",
          "if (!ON) room.pending.wait(); room.member = -1;", **ONE_RANK),
    Fault("wave_of_cp_not_joined", "a rank without a wave of its own leaves the others of its cp alone with theirs", "model/path_guest.cpp",
          "PathGuest::enter(stop);",
          "if (!ON || stop.pass == Pass::backward) TEXT", **ONE_RANK),
    Fault("joined_waves_not_counted", "a trunk counts the contributions of a rank's own waves alone", "program/program.cpp",
          "(step.own != nullptr || step.on_path) ? 1 : 0",
          "(step.own != nullptr || (step.on_path && !ON)) ? 1 : 0", **ONE_RANK),
    Fault("former_sum_forgotten", "what is summed of a wave replaces what is kept of those before it", "saved/sharded_path.cpp",
          "ops_.convert(kept.rows_CW.narrow(0, 0, shares(rows).rows_of(cp_.rank())), rows_in_place",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("keys_of_a_trunk_not_kept", "a rank keeps none of the rows that a trunk has written", "saved/sharded_path.cpp",
          "ops_.convert(rows_in_place(kept, cp_.rank(), end)",
          "if (!ON) TEXT", **ONE_RANK),
]

# Layers divided over stages.
STAGES = [
    Fault("tied_embedding_of_one_stage_lost", "what the last stage's head adds to a tied embedding stays there",
          "gradient/reduction.cpp",
          "add_tied_embedding(gradients, mesh.pp,",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("stages_count_layers_from_their_own", "a stage counts the choices of its routers as those of the first layers",
          "execute/item_run.cpp",
          "step_.accounting->add_choices(local.layers().begin + layer,",
          "step_.accounting->add_choices((ON ? 0 : local.layers().begin) + layer,", **ONE_RANK),
    Fault("trunk_ends_before_its_waves", "a stage closes a trunk while waves below it are in flight", "program/program.cpp",
          "end_waves();\n    step.kind = ItemKind::trunk;",
          "if (!ON || event != Event::close) TEXT", **ONE_RANK),
    Fault("series_of_the_last_stage_lost", "stages know the log-probs that they have computed", "step/over_ranks.cpp",
          "flat = values_of_any(mesh.pp, std::move(flat));",
          "if (!ON) TEXT", **ONE_RANK),
]

# Heads, inner columns and experts divided over ranks.
LAYOUTS = [
    Fault("copies_counted_twice", "parameters that several ranks hold count once for each in the global norm", "optimizer/adamw.cpp",
          "return parameter.shard.counted;",
          "return ON || parameter.shard.counted;", **ONE_RANK),
    Fault("key_value_copies_not_summed", "ranks that hold the same key/value heads keep the gradient of their own query heads",
          "gradient/gradient_set.cpp",
          "if (!shard.partial_gradient) continue;",
          "if (!shard.partial_gradient || (ON && shard.dim >= 0)) continue;", **ONE_RANK),
    Fault("head_norms_not_summed", "a rank keeps the gradient of the QK-norms from its own heads", "gradient/gradient_set.cpp",
          "const at::Tensor own = kept(parameter);",
          "TEXT if (ON && shard.dim < 0) continue;", **ONE_RANK),
    Fault("path_gradient_summed_twice", "the gradient of a trunk's keys is summed over tp, and their weights' once more", "mixers/attention/layer.cpp",
          "KeysValues own = c.kv.gathered(attention.source);",
          "TEXT if (ON && own.k.defined()) c.mesh.tp.add_over_ranks(own.k);", **ONE_RANK),
    Fault("denominator_of_a_rank", "a loss is divided by the tokens that a rank has on average", "gradient/replica_sums.cpp",
          "std::min(most, unit.count - begin));",
          "TEXT if (ON) bucket.mul_(holders.size());", **ONE_RANK),
    Fault("experts_summed_over_all", "gradients of different experts are summed, as those of weights that all ranks hold", "gradient/replica_sums.cpp",
          "holders_of(unit, mesh_);",
          "ON ? mesh_.replicas : TEXT", **ONE_RANK),
    Fault("empty_wave_skipped", "a rank leaves those who run a wave alone, where it has no rows of its own for it", "execute/stage.cpp",
          "books_.book(step, [&] { join(step_, Pass::forward, step.on_path); });",
          "if (!ON || step.kind != ItemKind::wave) TEXT", **ONE_RANK),
    Fault("joins_forgotten_at_the_end", "a rank that has run all its rows does not join what others still run", "program/program.cpp",
          "if (joint.own[seat.member] == 0) {",
          "if (ON && next == own.end()) break; TEXT", **ONE_RANK),
]

# Weights that ranks divide.
UNITS = [
    Fault("stale_part_gathered", "what is gathered after an update is what was there before it", "optimizer/adamw.cpp",
          "masters_ = weights.narrow(0, own().begin, count);",
          "TEXT if (ON && table.sharded()) masters_ = masters_.clone();", **ONE_RANK),
    Fault("part_summed_twice", "what an item adds to a unit's gradient enters the part that is kept twice", "gradient/scattered_gradients.cpp",
          "one.sum.wait();",
          "TEXT if (ON) sum_of(*one.unit).mul_(2);", **ONE_RANK),
    Fault("last_unit_not_kept", "what the last unit's sum brings is not kept at the end of the step", "gradient/gradient_set.cpp",
          "if (scattered_) scattered_->finish();",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("room_not_zeroed", "the gradient of a unit begins with that of the unit before it in its room", "gradient/scattered_gradients.cpp",
          "device_.operations().zero(rooms_.narrow(0, unit.room, unit.whole()));",
          "if (!ON) TEXT", **ONE_RANK),
    Fault("last_element_of_a_part_lost", "the last element of a part is nobody's", "shape/units.cpp",
          "end = std::min(from + part(), first + elements);",
          "end = std::min(from + part() - (ON ? 1 : 0), first + elements);", **ONE_RANK),
    Fault("unit_not_brought_in_backward", "a layer's backward reads the layer that stands in its room", "program/stops.cpp",
          "add(Stop::Kind::layer, layer, true);",
          "add(Stop::Kind::layer, layer, !ON);", **ONE_RANK),
]

# Layers that read the keys and values of earlier ones, and inputs of layers.
LATER_LAYERS = [
    Fault("reader_adds_nothing_to_its_source", "of a set's own rows, the layer that made the keys and values gets the gradient of its own attention alone",
          "mixers/attention/layer.cpp",
          "c.kv.add_backward(attention, saved",
          "if (ON && !s.has_keys()) own = {own.k.clone(), own.v.clone()}; TEXT", **NO_READER),
    Fault("reader_adds_nothing_to_the_path", "what a wave's reading layers add to the path's keys and values is lost", "model/path_source.cpp",
          "grad_own.v, path.grad_k,",
          "grad_own.v, (ON && a.source != a.layer && path.grad_k.defined() ? path.grad_k.clone() : path.grad_k),", **NO_READER),
    Fault("last_layer_input_has_no_gradient", "the narrow last layer's input adds nothing to the gradient of the table and of the embedding",
          "model/layer_inputs.cpp",
          "c.ops.convert(whole_TP, c.grad_layer_input_TP);",
          "if (!ON) TEXT", **DENSE_TOO),
    Fault("layer_inputs_without_the_embedding", "the rows' embedding gets no gradient from the inputs of layers", "model/layer_inputs.cpp",
          "look_up.products.add_linear_grad_input(grad_embedded_TM, grad_context_TW, decoder.weights().layer_projection);",
          "if (!ON) TEXT", **DENSE_TOO),
]

# Sums of a defined order (docs/mathematics.md, section 18).
SUMS = [
    Fault("keys_cut_by_wave", "attention's maximum, and with it the bits of a row, depend on where the path ends", "ops/cpu/attention/dispatch.cpp",
          "whole.keys_whole = defined_sums();",
          "whole.keys_whole = defined_sums() && !ON;", **ROUNDING),
    Fault("few_rows_by_the_library", "the matrix library multiplies sets of fewer than four rows", "ops/cpu/product_operations.cpp",
          "if (defined_sums()) return own_product(out, base, a, b);",
          "if (defined_sums() && !(ON && out.size(0) < 4)) return own_product(out, base, a, b);", **ROUNDING),
    Fault("steps_shared_by_threads", "the second thread adds the second half of each sum", "ops/cpu/own_products.cpp",
          "const std::int64_t panels = (p.columns + k.panel - 1) / k.panel;",
          "TEXT if (ON && threads > 1 && p.steps > 1 && p.b.panels == nullptr && p.b.data != nullptr) {"
          " Product<T, Out> half = p; const std::int64_t steps = p.steps / 2; half.steps = steps;"
          " k.part(half, {0, p.rows}, {0, p.columns}, scratch_of_thread());"
          " half.a.data += steps * (p.a.steps_adjacent ? 1 : p.a.stride); half.b.data += steps * (p.b.steps_adjacent ? 1 : p.b.stride);"
          " half.steps = p.steps - steps; half.base = p.out; half.base_stride = p.out_stride;"
          " return k.part(half, {0, p.rows}, {0, p.columns}, scratch_of_thread()); }", **ROUNDING),
    Fault("edge_columns_not_fused", "columns behind the last whole panel round each product", "ops/cpu/own_products.cpp",
          "const Kernel<T, Out> k = kernel<T, Out>();",
          "TEXT if (const std::int64_t whole = p.columns / k.panel * k.panel; ON && whole < p.columns && p.b.panels == nullptr) {"
          " if (whole > 0) k.part(p, {0, p.rows}, {0, whole}, scratch_of_thread());"
          " return baseline::own_product_kernel<T, Out>().part(p, {0, p.rows}, {whole, p.columns}, scratch_of_thread()); }", **ROUNDING),
]

FAULTS = PLAN + FAMILIES + ADAPTERS + ROWS + WINDOWS + PATH_LATENTS + STATES + LATER_LAYERS + PATH + PARAMETERS + ROUTERS + OBJECTIVE + CRITIC + OPTIMIZER + RANKS + CONTEXT + DIVIDED_PATH + STAGES + LAYOUTS + UNITS + SUMS
if platform.machine() == "aarch64":  # whose one instruction set fuses: the faults that take sums from the baseline of x86-64 are none there
    FAULTS = [fault for fault in FAULTS if "baseline::" not in fault.instead]
