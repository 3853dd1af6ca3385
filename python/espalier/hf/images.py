"""Images in prompts: the vision tower runs once for each prompt with images, and the prompt's image rows are rows of its trunk.

A rollout's `images` is the dict that the model's processor gives for its prompt (`pixel_values`, `image_grid_thw`, `image_sizes`, ...).
Rollouts whose dicts hold equal tensors share them. The planner sees token ids only, so each different dict gets its own id for image
placeholders: prompts with equal tokens and different images share the rows before the first image.

Calls of the language model take the tower's features as leaves, through transformers' argument `mm_encoder_outputs`. After the last item with
rows of the prompt, one backward of the tower uses the summed gradients of its features. Under FSDP, calls of the tower are collective: all ranks
run them before their first item, without gradients, and again after their last item, each with its backward (ShardedTower). If the model has
`get_rope_index`, it gives the prompt's positions (M-RoPE: temporal, height, width), and a response continues after the largest of them.
"""

import contextlib
import hashlib
import inspect
import sys
import weakref

import numpy as np
import torch

from espalier.errors import Error, Unsupported
from espalier.hf import ranks
from espalier.hf.checks import base_model, decoder_config

FIELD = "images"
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # computed from the prompt's tokens instead
_passed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # base model: the modes (training or not) in which its images passed


def takes(model):
    """True if the model can take images."""
    return hasattr(base_model(model).base_model, "get_image_features")


def of(model, prepared):
    """The Images of these Rollouts, or None if no rollout has any."""
    return Images(model, prepared) if any(record.get(FIELD) for record in prepared.records) else None


class Images:
    """`inputs`: the different dicts of tensors. `which`: each rollout's index into `inputs`, or None. `keys`: the prompts with the planner's
    ids, int32."""

    def __init__(self, model, prepared):
        self.model, self.base, self.device = model, base_model(model), ranks.device_of(model)
        self.backbone = self.base.base_model
        _check_family(model, self.base, self.backbone)
        self.token = _image_token(self.base)
        self.mutual = _see_each_other(self.backbone)
        self.by_axes = hasattr(self.backbone, "get_rope_index")  # M-RoPE
        self.taken = set(inspect.signature(type(self.backbone).get_image_features).parameters)
        self.forward_takes = {name for part in (self.base, self.backbone) for name in inspect.signature(type(part).forward).parameters}
        self.prompts, self.inputs, self.which, self._known, self._counted = prepared.prompts, [], [], {}, {}
        self.names = []  # a digest of each of `inputs`: equal tensors have equal digests, in every step
        self.keys = [self._key(i, record, prompt) for i, (record, prompt) in enumerate(zip(prepared.records, prepared.prompts))]
        for i, response in enumerate(prepared.responses):
            if (response == self.token).any():
                raise Error("input", f"rollouts[{i}]['response_ids']", "no image token", f"id {self.token}", "Images must be in prompts", 3)

    def _key(self, i, record, prompt):
        given, where, at = record.get(FIELD), f"rollouts[{i}]['{FIELD}']", prompt == self.token
        if not given:
            if at.any():
                raise Error("input", where, f"the dict of the model's processor, because the prompt has {at.sum()} image tokens", "none", "", 3)
            self.which.append(None)
            return prompt
        unknown = sorted(set(given) - _OF_TOKENS - self.taken)
        if unknown or "pixel_values" not in given:
            raise Unsupported(where, "pixel_values and other arguments of the model's get_image_features", ", ".join(unknown) or ", ".join(given))
        if not at.any():
            raise Error("input", f"rollouts[{i}]['prompt_ids']", f"image tokens (id {self.token})", "none", "Give the processor's input_ids", 3)
        tensors = {name: torch.as_tensor(given[name]) for name in given if name in self.taken and given[name] is not None}
        name = _digest(tensors)
        if name not in self._known:
            self._known[name] = len(self.inputs)
            self.names.append(name)
            self.inputs.append({field: x.to(self.device) for field, x in tensors.items()})
        self.which.append(self._known[name])
        return np.where(at, decoder_config(self.model).vocab_size + self.which[-1], prompt).astype(np.int32)

    def positions(self, rollout, begin, end):
        """[A, end - begin] position ids of tokens [begin, end) of a rollout. A = 3 for a model with M-RoPE, else 1."""
        prompt = self.prompts[rollout]
        if not self.by_axes:
            return np.arange(begin, end)[None]
        key = (self.which[rollout], prompt.tobytes())
        if key not in self._counted:
            self._counted[key] = self._count(rollout)
        counted = self._counted[key]
        after = counted.max() + 1 + np.arange(max(begin - len(prompt), 0), max(end - len(prompt), 0))
        return np.concatenate([counted[:, begin:min(end, len(prompt))], np.broadcast_to(after, (3, len(after)))], 1)

    def _count(self, rollout):
        prompt = self.prompts[rollout]
        if self.which[rollout] is None:
            return np.broadcast_to(np.arange(len(prompt)), (3, len(prompt)))
        ids = torch.as_tensor(prompt, dtype=torch.long, device=self.device)[None]
        grids = {name: x for name, x in self.inputs[self.which[rollout]].items() if name == "image_grid_thw"}
        positions, _ = self.backbone.get_rope_index(ids, mm_token_type_ids=(ids == self.token).int(), **grids)
        return positions[:, 0].cpu().numpy()

    def rows(self, rollout, begin, end):
        """(index into `inputs`, rows of its features) of the image tokens among [begin, end) of a rollout."""
        prompt = self.prompts[rollout]
        before, among = (prompt[:begin] == self.token).sum(), (prompt[begin:end] == self.token).sum()
        return self.which[rollout], np.arange(before, before + among)

    def blocks(self, rollout, begin, end):
        """[(begin, end)] of the runs of image tokens in [begin, end) of a rollout, whose rows see each other. Empty if the model's image rows are
        causal. Raises `Unsupported` if [begin, end) cuts a run."""
        if not self.mutual:
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.prompts[rollout] == self.token, [False]])))
        found = [(b, e) for b, e in zip(edges[::2].tolist(), edges[1::2].tolist()) if b < end and e > begin]
        if any(b < begin or e > end for b, e in found):
            raise Unsupported(type(self.base).__name__, "an image's rows in one call, because they all see each other", "an image split by a trunk",
                              f"Raise wave_tokens to {max(e for _, e in found)} or more")
        return found

    def dense_inputs(self, rollout, length):
        """The image arguments for a plain call with the first `length` tokens of this rollout."""
        if self.which[rollout] is None:
            return {}
        kinds = torch.zeros(1, length, dtype=torch.long, device=self.device)
        kinds[0, :len(self.prompts[rollout])] = torch.as_tensor(self.prompts[rollout] == self.token, device=self.device)
        kinds = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in self.forward_takes}
        return {**self.inputs[self.which[rollout]], **kinds}


class Tower:
    """The image features of one executor's prompts. They are computed when an item first needs them and freed by `finish`."""

    def __init__(self, images, gradients):
        self.images, self.gradients, self.open = images, gradients, {}

    def of_rows(self, parts):
        """The argument `mm_encoder_outputs` for a call whose image rows are `parts`: (index into `inputs`, rows of its features), in order."""
        for index, _ in parts:
            if index not in self.open:
                with torch.set_grad_enabled(self.gradients):
                    self.open[index] = self._opened(*_features(self.images.backbone, self.images.inputs[index]), index)
        picked = lambda number: torch.cat([self.open[index][2][number][torch.as_tensor(rows, device=self.images.device)] for index, rows in parts])
        return {"image": self.open[parts[0][0]][0](picked)}

    def _opened(self, made, features, index):
        """(function that wraps features in the model's output class, features with their graph, detached leaves)."""
        wanted = next(int((p == self.images.token).sum()) for p, which in zip(self.images.prompts, self.images.which) if which == index)
        if len(features[0]) != wanted:
            raise Error("input", FIELD, f"features for the prompt's {wanted} image tokens", f"{len(features[0])} of the vision tower", "", 3)
        parted, kind, deep = not torch.is_tensor(made.pooler_output), type(made), len(features) > 1

        def as_output(picked):
            held = lambda number: (picked(number),) if parted else picked(number)
            more = {"deepstack_features": [held(number) for number in range(1, len(features))]} if deep else {}
            return kind(pooler_output=held(0), **more)

        return as_output, features, [x.detach().requires_grad_(x.requires_grad) for x in features]

    def finish(self, indices):
        """[tensor, gradient, tensor, gradient, ...] for a Seed: features with their graph, and the gradients of their leaves. Frees the features of
        these prompts, which no later item needs."""
        pairs = []
        for index in indices:
            if index in self.open:
                _, features, leaves = self.open.pop(index)
                pairs += [part for x, leaf in zip(features, leaves) if leaf.grad is not None for part in (x, leaf.grad)]
        return pairs


class ShardedTower:
    """Runs the vision tower of a sharded model for `own`, a list of (Tower, index of the images of a prompt), on every rank. `begin` computes the
    features that `Tower.of_rows` reads. `within`: makes the context manager of every call.

    A rank with fewer prompts than another calls the tower with a stand-in, so that all ranks make the same number of calls.
    """

    def __init__(self, model, own, gradients, within=contextlib.nullcontext):
        self.model, self.base, self.own, self.gradients, self.within = model, base_model(model), own, gradients, within
        told = ranks.told_by_all(model, (len(self.own), _outline(self.own[0][0].images.inputs[0]) if self.own else None))
        self.calls = max(count for count, _ in told)
        self.outline = next((outline for _, outline in told if outline is not None), None)
        self.trains = False

    def begin(self):
        """Raises `Error` behind all calls, which the other ranks make, too, if the images of a prompt do not fit it."""
        problem = None
        for place in range(self.calls):
            with torch.no_grad():
                made, features = self._call(place)
            self.trains = self.gradients and any(p.requires_grad for p in self.base.parameters())
            if place < len(self.own):
                tower, index = self.own[place]
                try:
                    tower.open[index] = tower._opened(made, [x.requires_grad_(self.trains) for x in features], index)
                except Error as wrong:
                    problem = problem or wrong
        if problem is not None:
            raise problem

    def finish(self):
        """Runs the tower again with a graph, each call directly followed by its backward: FSDP1 allows nothing between the two."""
        from espalier.hf.step import Seed, backward
        for place in range(self.calls if self.trains else 0):
            with torch.enable_grad():
                _, features = self._call(place)
            leaves = [None] * len(features)
            if place < len(self.own):
                tower, index = self.own[place]
                leaves = tower.open.pop(index)[2]
            pairs = [part for x, leaf in zip(features, leaves) if x.requires_grad
                     for part in (x, torch.zeros_like(x) if leaf is None or leaf.grad is None else leaf.grad)]
            if pairs:
                backward(Seed.apply(*pairs))

    def _call(self, place):
        if place < len(self.own):
            tower, index = self.own[place]
            inputs = tower.images.inputs[index]
        else:
            inputs = _stand_in(self.outline, ranks.device_of(self.model))
        made = []

        def run():
            kind, features = _features(self.base.base_model, inputs)
            made.append(kind)
            return features

        with self.within():
            features = ranks.inside(self.model, self.base, run)
        return made[0], features


def _outline(inputs):
    """A copy of the dict with shape and dtype in place of floating-point values."""
    return {name: x.cpu() if not x.is_floating_point() else (x.shape, x.dtype) for name, x in inputs.items()}


def _stand_in(outline, device):
    return {name: x.to(device) if torch.is_tensor(x) else torch.zeros(x[0], dtype=x[1], device=device) for name, x in outline.items()}


def _features(backbone, inputs):
    """(output of get_image_features, list of its features as tensors [rows, width])."""
    made = backbone.get_image_features(**inputs, return_dict=True)
    return made, [_flat(made.pooler_output)] + [_flat(x) for x in getattr(made, "deepstack_features", None) or ()]


def _flat(features):
    """The features as one tensor [rows, width]. Models return one tensor for each image, or one for all images."""
    parts = features if isinstance(features, (list, tuple)) else [features]
    return torch.cat([x.flatten(0, -2) for x in parts])


def _digest(tensors):
    out = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        out.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        out.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return out.digest()


def _image_token(base):
    token = next((value for name in ("image_token_id", "image_token_index") if (value := getattr(base.config, name, None)) is not None), None)
    if token is None:
        raise Unsupported(type(base).__name__, "a config with image_token_id", "none: its images are not tokens of the prompt")
    return int(token)


def _check_family(model, base, backbone):
    name = type(base).__name__
    if not hasattr(backbone, "get_image_features") or "mm_encoder_outputs" not in inspect.signature(type(backbone).forward).parameters:
        raise Unsupported(name, "images as rows of the prompt, from get_image_features and by mm_encoder_outputs", "a model with images of another kind")
    makes_masks = hasattr(_file_of(backbone), "create_masks_for_vision_model")
    if (makes_masks or "token_type_ids" in inspect.signature(type(backbone).forward).parameters) and not _see_each_other(backbone):
        raise Unsupported(name, "image rows that are causal, or that see those of their own image", "other masks around images",
                          "Leave the images out, or run the trainer's own path")


def _file_of(backbone):
    return sys.modules[type(backbone).__module__]


def _see_each_other(backbone):
    """True if a row of an image also sees the later rows of that image (Gemma 3). `check` compares the results."""
    return hasattr(_file_of(backbone), "get_block_sequence_ids_for_mask") and "token_type_ids" in inspect.signature(type(backbone).forward).parameters


def checked(model):
    base = base_model(model)
    return base.training in _passed.get(base, ())


def shortest(prepared):
    """The shortest prompt that has images, with its images: {"prompt_ids", "images"}. None if no prompt has images."""
    which = prepared.images.which if prepared.images is not None else []
    places = [i for i, own in enumerate(which) if own is not None]
    if not places:
        return None
    place = min(places, key=lambda i: len(prepared.prompts[i]))
    return dict(prompt_ids=prepared.prompts[place], images=prepared.records[place][FIELD])


def check(model, prompt, dense, shared):
    """Compares the model's own calls with shared ones, for a prompt with images and two continuations: their log-probs and entropies, with the
    limit of probe.py. Raises `Unsupported` if they differ by more. `dense(rollouts, seen)` and `shared(rollouts, seen)` run rollouts without
    gradients. Called once for each model."""
    from espalier.hf import probe
    base = base_model(model)
    records = [dict(prompt, response_ids=ids[probe.BEGINNING:]) for ids in probe.sequences(base, without=(_image_token(base),))]

    def run(how):
        found = {}
        how(records, lambda wave: found.update({i: torch.stack([wave.logprobs, wave.entropies])[:, wave.rollout == i] for i in wave.rollouts}))
        return torch.cat([found[i] for i in sorted(found)], 1).double()

    with probe.named(type(base).__name__, "images in prompts"), probe.quiet(model), torch.no_grad():
        own = run(dense)
        with probe.nudged(base.get_input_embeddings()):
            rounding = float((run(dense) - own).norm())
        error = float((run(shared) - own).norm())
    layers = getattr(decoder_config(base), "num_hidden_layers", 1)
    if not error <= 2 * (layers + 1) ** .5 * rounding:
        raise Unsupported(type(base).__name__, "image rows that responses read only through attention",
                          f"log-probs of shared rows that differ by {error:.1e} from the model's own; rounding explains {rounding:.1e}")
    _passed.setdefault(base, set()).add(base.training)
