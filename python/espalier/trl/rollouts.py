"""GRPO and RLOO: a prompt is shared by all micro-batches of an accumulation window, even if TRL's shuffle spreads a group over several of them. Its
backward runs once, at the window's end (window.py). Under DDP the model is called without its wrapper, and gradients are reduced once, at the window's
end. Under FSDP all ranks make equally many calls.
"""

import collections
import contextlib

import numpy as np
import torch

from espalier import native
from espalier.errors import Error, Unsupported
from espalier.hf import check_images, ranks
from espalier.hf.attention import Phase
from espalier.rows.trunk import RowSet
from espalier.hf.model_parts import base_model
from espalier.hf.images import takes as takes_images
from espalier.hf.routers import RowSums, experts_per_token, load_balancing, logits_of
from espalier.hf.calls import call_model
from espalier.hf.towers import ShardedTower, Tower
from espalier.rows.transfer import to_device
from espalier.trl import head, images, verification
from espalier.trl.sharing import Sharing
from espalier.trl.window import Prompt, Window


class SharedPrompts(Sharing):
    """Mixin for a trainer with TRL's `_get_per_token_logps_and_entropies`; precedes it among the bases."""

    def __init__(self, *args, **kwargs):
        self._window = Window()
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False,
                                           compute_aux_loss=False, **others):
        if self.shared_prompts and not ranks.sharded(model):
            model = ranks.without_replicas(model)  # on every rank and in every micro-batch, shared or not
        self._probe([model])

        def plain():
            return super(SharedPrompts, self)._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss=compute_aux_loss, **others)

        rows = _Rows(input_ids, attention_mask, logits_to_keep)
        rows.towers_together = self._together(model) and takes_images(model) and bool(ranks.largest(model, self._has_images(others))[0])
        pictures, in_use = self._images(model, rows, others)
        if compute_aux_loss and batch_size and batch_size < len(input_ids):
            in_use.append("a router loss of its parts")
        if in_use:
            self._note("this batch has " + ", ".join(in_use))
        shares = not in_use and self._sharing(model, input_ids.shape[1]) and rows.can_share and bool(compute_aux_loss or rows.live.any())
        together = self._together(model)
        if rows.towers_together:  # TRL's own call runs the tower in its midst: then no other rank may share
            shares = not any(ranks.largest(model, not shares and self._has_images(others))) and shares
        if together:
            due, shares = self._due_together(model, shares)
        counted, mark = dict(self.shared_rows), self._window.mark()
        size = batch_size or len(input_ids)
        shared = lambda: self._pass(model, rows, shares, size, compute_entropy, compute_aux_loss, pictures, plain)
        if not shares and not together:
            self._verify(model, None)
            return plain()
        try:
            if together and due:
                self._compare(model, rows, plain, shared)
                self._verified_by_all.add(self._key(model))
            elif not together:
                self._verify(model, lambda: self._compare(model, rows, plain, shared))
            self.shared_rows = dict(counted)
            return shared()
        except Unsupported as reason:
            self._refuse(model, reason)
        self.shared_rows = counted
        self._window.reset(mark)
        return plain()

    def _due_together(self, model, shares):
        """(whether all ranks compare this pass, whether this rank shares it), for a sharded model. A pass that was not compared yet is shared only at the
        beginning of an accumulation window, because a comparison needs gradients that no other micro-batch has added to."""
        if not self.verify or self._key(model) in self._verified_by_all:
            return False, shares
        if torch.is_grad_enabled() and self._micro_batches:
            return False, False
        return bool(ranks.largest(model, shares)[0]), shares

    def _compare(self, model, rows, plain, shared):
        """Compares with TRL's own call: log-probs and entropies of every response token, and the router's loss."""
        live = torch.arange(rows.shape[1], device=rows.ids.device) < torch.as_tensor(rows.live, device=rows.ids.device)[:, None]
        values = lambda logprobs, entropies, aux_loss=None: [x[live] for x in (logprobs, entropies) if x is not None] + (
            [aux_loss.reshape(1)] if aux_loss is not None else [])
        window, self._window = self._window, Window()

        try:
            self.verification = verification.compare(model, lambda: values(*plain()), lambda: values(*shared()), lambda: self._prompts_backward(model))
        finally:
            self._window = window
            self._give_layers_back(model)

    def _images(self, model, rows, fields):
        """(Rollouts with the batch's Images or None, reasons why the batch cannot be shared). A model's first images are compared with its own calls,
        under FSDP by all ranks together."""
        if not self.shared_prompts:
            return None, []
        prepared, unknown, problem = None, [], None
        try:
            if rows.can_share:
                prepared, unknown = images.of(model, rows, fields)
        except Error as reason:
            unknown = [str(reason)]
        longest = rows.ids.shape[1]
        if not rows.towers_together and (prepared is None or not self._sharing(model, longest)):
            return prepared, unknown
        try:
            check_images(model, prepared, longest)
        except Error as reason:
            if not rows.towers_together:
                return None, [str(reason)]
            problem = reason
        if rows.towers_together:
            try:
                self._agree(model, problem)
            except Unsupported:
                return None, []  # all ranks have refused the model, and noted why
        return prepared, unknown

    @staticmethod
    def _has_images(fields):
        return any(fields.get(name) is not None for name in ("pixel_values", "image_grid_thw"))

    def _pass(self, model, rows, shares, batch_size, compute_entropy, routed, pictures, plain):
        """The batch's log-probs, entropies and router loss, with shared prompts. Under FSDP all ranks make the same calls: one for each prompt, or for each
        that another rank has, then one for each part of the batch, which is TRL's own on a rank whose batch is not shared. Raises `Unsupported` if this
        pass cannot be shared, under FSDP on all ranks if it is so on one."""
        rows.pictures = pictures and _Pictures(pictures.images, torch.is_grad_enabled())
        window, together = self._window if torch.is_grad_enabled() else Window(), self._together(model)
        if rows.pictures and shares:
            window.pictures.append(rows.pictures)
        with self._our_layers(model) if shares else contextlib.nullcontext():
            new = self._new_prompts(model, rows, window, routed) if shares else {}
            wrong = self._run_towers(model, rows, shares, window) if rows.towers_together else None
            problem, out = window.forward(model, {} if wrong else new, lambda: self._stand_in(model)) or wrong, None
            self.shared_rows["run"] += sum(prompt.trunk.rows for prompt in new.values())
            try:
                if problem is None and shares:
                    out = self._of_parts(model, rows, batch_size, compute_entropy, routed, window.prompts)
                elif together:
                    out = plain()
            except Unsupported as reason:
                problem = reason
            if together:
                self._agree(model, problem)
            elif problem is not None:
                raise problem
        return out

    def _run_towers(self, model, rows, shares, window):
        """Under FSDP, before the new prompts: the vision tower for their images and the responses', on all ranks. Returns an `Unsupported` or
        None."""
        own = rows.pictures.of_prompts | rows.pictures.of_responses(rows) if rows.pictures and shares else set()
        towers = ShardedTower(model, [(rows.pictures.tower, index) for index in sorted(own)], torch.is_grad_enabled(), self.accelerator.autocast)
        if towers.calls:
            window.towers.append(towers)
            try:
                towers.begin()
            except Error as wrong:
                return Unsupported("this batch", "images whose features are those of its image tokens", str(wrong))
        return None

    def _new_prompts(self, model, rows, window, routed):
        """{key: Prompt} of the prompts that the window does not have. They run the rows of all tokens but the last one, with which every response's rows
        begin."""
        new = {}
        for row in rows.order:
            key = rows.key(row)
            if key not in window.prompts and key not in new and len(rows.prompt(row)) > 1:
                new[key] = self._prompt(model, rows, row, routed)
        return new

    def _prompt(self, model, rows, row, routed):
        ids, pictures = rows.prompt(row)[None, :-1], rows.pictures
        count = ids.shape[1]
        positions = rows.positions(row, 0, count)[..., None, :]
        if pictures:
            pictures.of_prompts.update(index for index, *_ in pictures.images.rows(row, 0, count))

        def call(trunk):
            with self.accelerator.autocast():
                seen, more = pictures.of_tokens([(row, 0, count)]) if pictures else ((), {})
            phase = Phase([RowSet(0, (), [(0, count, count)])], count, captures=trunk, mutual=seen)
            last = torch.full((1,), count - 1, device=ids.device)
            with self.accelerator.autocast(), phase.forward(), _router_logits(model, routed) as router:
                logits, _ = call_model(model, ids, positions, phase, last, **more, **router.wanted)
            return logits, router.sums() if routed else None

        return Prompt(call, count)

    def _stand_in(self, model, of_part=False):
        """A call of one token, whose output nothing reads: in place of a prompt's, or of a part of the batch."""
        nothing = torch.zeros(1, 1, dtype=torch.long, device=ranks.device_of(model))
        with self.accelerator.autocast():
            return head.stand_in(model, nothing) if of_part else model(input_ids=nothing, use_cache=False)["logits"]

    def _of_parts(self, model, rows, batch_size, compute_entropy, routed, prompts):
        parts, problem, made = [], None, [rows.order[at:at + batch_size] for at in range(0, len(rows.order), batch_size)]
        for members in made:
            members = [row for row in members if routed or rows.live[row]]
            if self._together(model) and (problem is not None or not members):
                self._stand_in(model, of_part=True)
            if problem is not None:
                continue
            try:
                parts.append(self._responses(model, rows, members, prompts, routed))
            except Unsupported as reason:
                if not self._together(model):
                    raise
                problem = reason
        if problem is not None:
            raise problem
        place = torch.cat([part[0] for part in parts])

        def spread(values):
            values = torch.cat(values)
            return values.new_zeros(rows.shape).index_put((place[:, 0], place[:, 1]), values)

        entropies = spread([part[2] for part in parts]) if compute_entropy else None
        return spread([part[1] for part in parts]), entropies, parts[0][3]

    def _responses(self, model, rows, members, prompts, routed):
        """Runs all members in one call of the model. Returns (row, position) of each response token [T, 2], its log-prob and its entropy [T], and the
        router's loss. With a router's loss, the rows of the last tokens also run, because the loss counts them."""
        device = rows.ids.device
        ids, positions, labels, place, scored, sets, parts, at, longest = [], [], [], [], [], [], [], 0, 0
        above = collections.Counter()
        last = 1 if routed else 0
        for row in members:
            prompt, response = rows.prompt(row), rows.response(row)
            n, depth = len(response), len(prompt) - 1
            length = n + last
            longest = max(longest, depth + length)
            ids += [prompt[-1:], response[:length - 1]]
            labels += [response, response.new_full((last,), -100)]
            positions.append(rows.positions(row, depth, depth + length))
            parts.append((row, depth, depth + length))
            place.append(torch.stack([torch.full((n,), row, device=device), torch.arange(n, device=device)], 1))
            scored.append(torch.arange(at, at + n, device=device))
            trunks = ()
            if depth > 0:
                key = rows.key(row)
                above[key] += 1
                trunks = (prompts[key].trunk,)
            if not sets or sets[-1].trunks != trunks:
                sets.append(RowSet(at, trunks))
            sets[-1].runs.append((at, length, at + length))
            at += length
            self.shared_rows["without_sharing"] += len(prompt) + n
        if not members:
            return torch.zeros(0, 2, dtype=torch.long, device=device), *torch.zeros(2, 0, device=device), None
        self.shared_rows["run"] += at
        with self.accelerator.autocast():
            seen, more = rows.pictures.of_tokens(parts) if rows.pictures else ((), {})
        phase = Phase(sets, longest, mutual=seen)
        with self.accelerator.autocast(), phase.forward(), _router_logits(model, routed) as router:
            logprobs, entropies = head.scored(self, model, torch.cat(labels), input_ids=torch.cat(ids)[None],
                                              position_ids=torch.cat(positions, -1)[..., None, :], espalier=phase, **more, **router.wanted)
        aux_loss = None
        if routed:
            own = router.sums()
            aux_loss = load_balancing([(1, own, own.sums)] + [(times, prompts[key].router, prompts[key].leaf) for key, times in above.items()])
        scored = torch.cat(scored)
        return torch.cat(place), logprobs[scored], entropies[scored], aux_loss

    def training_step(self, model, *args, **kwargs):
        try:
            return super().training_step(model, *args, **kwargs)
        except BaseException:
            self._window = Window()
            raise

    def _step_done(self, model):
        if not ranks.sharded(model):
            self._window.release()
        if self.accelerator.sync_gradients:
            self._finish_window(model)

    def _finish_window(self, model):
        """Runs the backward of all prompts before the weights change, then reduces once over ranks."""
        self._prompts_backward(model)
        ddp = ranks.replicas(model)
        if ddp is not None and self.shared_prompts and not ranks.sharded(model):
            ranks.reduce_gradients(ddp)

    def _prompts_backward(self, model):
        window, self._window = self._window, Window()
        if window.calls or window.pictures or window.towers:
            with self._our_layers(model):
                problem = window.backward(model)
            if ranks.alternating(model):
                self._agree(model, problem)


class _Pictures:
    """The images of a micro-batch, and the vision tower's features of those that its calls read. `of_prompts`: indices of the tower's inputs that its
    new prompts read, until the window's end."""

    def __init__(self, of_rows, gradients):
        self.images, self.tower, self.of_prompts = of_rows, Tower(of_rows, gradients), set()

    def of_tokens(self, parts):
        """([(begin, end)] of rows that see each other, keyword arguments for a call). `parts`: (row of the batch, begin, end) of the call's tokens."""
        blocks, at = [], 0
        for row, begin, end in parts:
            blocks += [(b - begin + at, e - begin + at) for b, e in self.images.blocks(row, begin, end)]
            at += end - begin
        found = [part for row, begin, end in parts for part in self.images.rows(row, begin, end)]
        return blocks, {"mm_encoder_outputs": self.tower.of_rows(found)} if found else {}

    def of_responses(self, rows):
        """Indices of the tower's inputs with tokens in the calls of the batch's responses."""
        return {index for row in rows.order for index, *_ in self.images.rows(row, len(rows.prompt(row)) - 1, len(rows.prompt(row)) + int(rows.live[row]))}

    def gathered(self, prompts_too):
        """The same as `Prompt.gathered`, after the backward of the responses or, with `prompts_too`, of all prompts."""
        return self.tower.finish([index for index in self.tower.open if prompts_too or index not in self.of_prompts])


class _router_logits:
    """Context manager for a call of the model: collects the logits of its routers, which TRL's head does not return."""

    def __init__(self, model, on):
        self.model, self.on, self.seen = model, on, []
        self.wanted = {"output_router_logits": True} if on else {}

    def __enter__(self):
        if self.on:
            backbone = base_model(self.model).base_model
            self.handle = backbone.register_forward_hook(lambda _, __, output: self.seen.append(logits_of(output)))
        return self

    def __exit__(self, *_):
        if self.on:
            self.handle.remove()

    def sums(self):
        return RowSums(self.seen[-1], experts_per_token(self.model))


class _Rows:
    """TRL's padded batch: prompts padded on the left, responses on the right."""

    def __init__(self, input_ids, attention_mask, logits_to_keep):
        self.split = input_ids.shape[1] - logits_to_keep
        self.shape = (len(input_ids), logits_to_keep)
        self.ids, self.mask = input_ids, attention_mask
        self.host, mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()  # the only time that the host waits
        mask = mask != 0
        prompts, responses = mask[:, :self.split], mask[:, self.split:]
        self.first = self.split - prompts.sum(1)
        self.live = responses.sum(1)
        gaps = (np.diff(prompts.astype(np.int8), axis=1) < 0).any() or (np.diff(responses.astype(np.int8), axis=1) > 0).any()
        self.can_share = not gaps and bool((self.first < self.split).all())
        self.groups = native.group([self.host[i, self.first[i]:self.split] for i in range(len(mask))]) if self.can_share else None
        self.order = np.argsort(self.groups, kind="stable").tolist() if self.can_share else []  # rows with equal prompts stand together
        self.pictures = None
        self.towers_together = False  # FSDP shards the model, and a rank's batch has images

    def key(self, row):
        """A key that is equal for rows whose prompts have equal tokens and images."""
        prompt = self.host[row, self.first[row]:self.split]
        return tuple(prompt.tolist()), self.pictures and self.pictures.images.names_of(row, 0, len(prompt))

    def positions(self, row, begin, end):
        """The position ids of tokens [begin, end) of a row: [T], or [3, T] with M-RoPE."""
        if self.pictures is None:
            return torch.arange(begin, end, device=self.ids.device)
        counted, = to_device(self.ids.device, self.pictures.images.positions(row, begin, end))
        return counted if len(counted) > 1 else counted[0]

    def prompt(self, row):
        return self.ids[row, self.first[row]:self.split]

    def response(self, row):
        return self.ids[row, self.split:self.split + self.live[row]]
