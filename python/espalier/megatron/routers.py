"""Router losses by logical tokens: losses of micro-batches of whole rollouts, from rows that run once.

Megatron's balancing loss of a micro-batch with T tokens, in one layer with E experts of which k are chosen, is

    A = c E / (k T^2) sum_e n_e P_e        n_e: tokens that chose e        P_e = sum_t p_te

n has no gradient. So a first pass without gradients counts the choices of each rollout, and then A is linear in p: a row adds p_e times the sum of
c E n_e / (k T^2) over the micro-batches of the rollouts that it is a token of. The z-loss, a mean of squares, is linear in rows as well. Padding
rows count for nothing. A step's micro-batches are the rollouts themselves, unless the caller says which rollouts a trainer runs together.
"""

import contextvars
import inspect

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss

from espalier.megatron.calls import call_of
from espalier.rows.transfer import queued, to_device


plain_routes = contextvars.ContextVar("espalier_megatron_plain_routes", default=None)  # the CallRoutes of a plain call of the model


class RouterStep:
    """The router losses of one step. `lengths` [R]: of the rollouts. `batches`: lists of rollouts that a dense step runs as one micro-batch. `scale`: a
    row's loss is multiplied by it, because the schedule divides by the micro-batches that it runs."""

    def __init__(self, config, lengths, batches, micro_batches, device, counting=False):
        self.config, self.counting, self.counts = config, counting, {}
        batch = np.empty(len(lengths), np.int64)
        for at, members in enumerate(batches):
            batch[members] = at
        self.batch, = to_device(device, batch)
        lengths = torch.as_tensor(lengths, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(len(batches), dtype=torch.float64, device=device).index_add_(0, self.batch, lengths)
        divided = lambda n: float(torch.ones(1) / n)  # as Megatron rounds it
        self.scale = 1.0 if config.calculate_per_token_loss else divided(len(batches)) / divided(micro_batches)
        self.shares = {}

    def below(self, call):
        """(for each row the index of its entry in `call.members`, [members + 1, R]: 1 where a rollout has the rows). The last entry is padding."""
        below, of_row = np.zeros((len(call.members) + 1, len(self.batch))), np.full(len(call.ids), len(call.members))
        for at, (rows, rollouts) in enumerate(call.members):
            of_row[rows[rows >= 0]] = at
            below[at, rollouts] = 1
        of_row, = to_device(self.batch.device, of_row)
        return of_row, queued(torch.from_numpy(below), self.batch.device)

    def count(self, layer, below, chosen):
        found = below.T @ chosen
        self.counts[layer] = self.counts[layer] + found if layer in self.counts else found

    def settle(self, counts):
        """Takes the counts of the first pass, summed over the ranks that have parts of the same rows."""
        groups = [parallel_state.get_tensor_model_parallel_group()] if self.config.sequence_parallel else []
        for layer in sorted(counts):
            for group in (*groups, parallel_state.get_context_parallel_group()):
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(counts[layer], group=group)
            of_batch = torch.zeros(len(self.tokens), counts[layer].shape[1], dtype=torch.float64, device=counts[layer].device)
            self.shares[layer] = of_batch.index_add_(0, self.batch, counts[layer])

    def aux_weights(self, layer, coefficient, topk):
        """[R, E]: a row of a rollout adds its probabilities times these to the balancing losses."""
        return (self.shares[layer] * (coefficient * self.config.num_moe_experts / topk) / self.tokens.square()[:, None])[self.batch]

    def z_weights(self):
        """[R]: a row of a rollout adds its squared log-sum-exp times these to the z-losses."""
        return 1 / self.tokens[self.batch]

    def tokens_if_divided(self, part):
        """[R]: the tokens of each rollout's micro-batch if Megatron divides all gradients by the step's tokens later, else 1. `part`: of these tokens."""
        return (self.tokens * part if self.config.calculate_per_token_loss else torch.ones_like(self.tokens))[self.batch]


class CallRoutes:
    """The recorded experts of a call's rows, [T, layers with experts, k], -1 where nothing was recorded. `layers`: those with experts, of the model."""

    def __init__(self, chosen, layers):
        self.chosen, self.layers = chosen, layers

    def of_layer(self, number):
        """[T, k] of the layer with this number, which counts from 1."""
        return self.chosen[:, self.layers.index(number - 1)].long()


class _Replay:
    """In the place of Megatron's RouterReplay while a router chooses. `indices` [T, k], -1 where the router chooses freely."""

    def __init__(self, indices):
        self.indices = indices

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        _, free = default_compute_topk(scores, topk, num_groups, group_topk)
        indices = torch.where(self.indices >= 0, self.indices, free)
        return scores.gather(1, indices), indices


def layers_with_experts(model):
    """The indices of the whole model's layers that have experts."""
    pattern, frequency = getattr(model, "hybrid_layer_pattern", None), model.config.moe_layer_freq
    if pattern:
        return [at for at, letter in enumerate(pattern.partition("/")[0].replace("|", "")) if letter == "E"]
    layers = range(model.config.num_layers)
    return [at for at in layers if (at % frequency == 0 if isinstance(frequency, int) else frequency[at])]


def attach(layer):
    """Makes the router of a layer with experts add the losses of calls, and choose the experts that they have recorded."""
    router = getattr(getattr(layer, "mlp", None), "router", None)
    if router is None:
        return
    config, here = router.config, [None]  # here: the call of the layer's current forward, also of one that runs again
    own_forward, own_routing, own_z = layer.forward, router.routing, router.apply_z_loss
    own_aux, own_bias, own_log = router._apply_aux_loss, router._apply_expert_bias, router.attach_and_log_load_balancing_loss
    ranks = lambda: router.tp_cp_group.size()
    multiplied = "tp_cp_group.size()" in inspect.getsource(type(router).attach_and_log_load_balancing_loss)  # since 0.17

    def forward(*args, packed_seq_params=None, **more):
        before, here[0] = here[0], call_of(packed_seq_params)
        try:
            return own_forward(*args, packed_seq_params=packed_seq_params, **more)
        finally:
            here[0] = before

    def own(rows):
        """The part of a call's rows [T, ...] that this rank's router has."""
        if not config.sequence_parallel:
            return rows
        return rows.chunk(parallel_state.get_tensor_model_parallel_world_size())[parallel_state.get_tensor_model_parallel_rank()]

    def rows(weights):
        """Weights of segments [S + 1, ...] as weights of the rows that this rank's router has."""
        return own(weights[here[0].below[0]])

    def routing(logits, *args, **more):
        call = here[0]
        if call is not None and call.routing is not None and call.routing.counting:
            chosen, _ = compute_routing_scores_for_aux_loss(logits.view(-1, config.num_moe_experts), router.topk, router.score_function,
                                                            fused=config.moe_router_fusion)
            call.routing.count(router.layer_number, rows(call.below[1]), chosen.to(torch.float64))
        routes = call.routes if call is not None else plain_routes.get()
        if routes is None:
            return own_routing(logits, *args, **more)
        before, router.router_replay = getattr(router, "router_replay", None), _Replay(own(routes.of_layer(router.layer_number)))
        try:
            return own_routing(logits, *args, **more)
        finally:
            router.router_replay = before

    def added(to, per_rollout, value_of):
        """`to`, with a loss that is linear in the rows' weights. Returns it and the loss to be logged, which no number of tokens multiplies."""
        call = here[0]
        value = logged = value_of(rows(call.below[1] @ per_rollout))
        if config.calculate_per_token_loss:
            tokens = call.routing.tokens_if_divided(1.0 if multiplied else 1.0 / ranks())
            value = value_of(rows(call.below[1] @ (per_rollout * tokens.view(-1, *[1] * (per_rollout.dim() - 1)))))
        return MoEAuxLossAutoScaler.apply(to, (value * call.routing.scale).to(to.dtype)), logged.detach()

    def aux(probs, scores, routing_map, *args, **more):
        coefficient, call = router.get_aux_loss_coeff("aux_loss"), here[0]
        if call is None or coefficient == 0:
            return own_aux(probs, scores, routing_map, *args, **more)
        weights = call.routing.aux_weights(router.layer_number, coefficient, router.topk)
        probs, value = added(probs, weights, lambda weights: (scores * weights.to(scores.dtype)).sum())
        own_log(probs.detach(), coefficient, value, "load_balancing_loss", router.tp_cp_group, valid_token_count=1)
        return probs

    def z(logits, *args, **more):
        call = here[0]
        if call is None or not (config.moe_z_loss_coeff and router.training and torch.is_grad_enabled()):
            return logits if call is not None else own_z(logits, *args, **more)
        # Megatron divides the coefficient by the ranks whose means it adds; here each rank has its own rows of one mean.
        squares = torch.logsumexp(logits, -1).square()
        logits, value = added(logits, call.routing.z_weights() * config.moe_z_loss_coeff, lambda weights: (squares * weights.to(squares.dtype)).sum())
        _log_z(router, value / config.moe_z_loss_coeff * ranks())
        return logits

    def bias(routing_map, *args, **more):
        call = here[0]
        if call is None:
            return own_bias(routing_map, *args, **more)
        if router.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                times = rows(call.below[1].sum(1))
                router.local_tokens_per_expert += (times[:, None] * routing_map).sum(0).to(router.local_tokens_per_expert.dtype)

    layer.forward = forward
    router.routing, router.apply_z_loss, router._apply_aux_loss, router._apply_expert_bias = routing, z, aux, bias


def _log_z(router, value):
    """Adds to the mean of the z-loss that Megatron's trackers keep."""
    layers = router.config.num_layers
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().record("z_loss", value, router.layer_number, layers, avg_group=router.tp_dp_cp_group)
    else:
        moe_utils.save_to_aux_losses_tracker("z_loss", value, router.layer_number, layers)
