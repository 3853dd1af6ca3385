"""Calls of the vision tower, and their backward.

After the last item with rows of an image, one backward of the tower uses the summed gradients of its features. Under FSDP, calls of the tower are
collective: all ranks run them before their first item, without gradients, and again after their last item, each with its backward (ShardedTower).
"""

import contextlib

import torch

from espalier.errors import Error
from espalier.hf import ranks
from espalier.hf.calls import Seed, backward
from espalier.hf.model_parts import base_model
from espalier.hf.images import FIELD


class Tower:
    """The image features of one executor. They are computed when an item first needs them and freed by `finish`."""

    def __init__(self, images, gradients):
        self.images, self.gradients, self.open = images, gradients, {}

    def of_rows(self, parts):
        """The argument `mm_encoder_outputs` for a call whose image rows are `parts`: (index into `inputs`, begin, end of rows of its features), in
        order."""
        for index, *_ in parts:
            if index not in self.open:
                with torch.set_grad_enabled(self.gradients):
                    self.open[index] = self._opened(*_features(self.images.backbone, self.images.inputs[index]), index)
        picked = lambda number: torch.cat([self.open[index][2][number][begin:end] for index, begin, end in parts])
        return {"image": self.open[parts[0][0]][0](picked)}

    def _opened(self, made, features, index):
        """(function that wraps features in the model's output class, features with their graph, detached leaves)."""
        parted, kind, deep = not torch.is_tensor(made.pooler_output), type(made), len(features) > 1
        wanted, found = self.images.sizes_of[index], [len(_flat(x)) for x in made.pooler_output] if parted else None
        if len(features[0]) != sum(wanted):
            raise Error("input", FIELD, f"features for {sum(wanted)} image tokens", f"{len(features[0])} of the vision tower", "", 3)
        if parted and len(found) == len(wanted) != 1 and found != wanted:
            raise Error("input", FIELD, f"features for {wanted} image tokens", f"{found} of the vision tower", "", 3)

        def as_output(picked):
            held = lambda number: (picked(number),) if parted else picked(number)
            more = {"deepstack_features": [held(number) for number in range(1, len(features))]} if deep else {}
            return kind(pooler_output=held(0), **more)

        return as_output, features, [x.detach().requires_grad_(x.requires_grad) for x in features]

    def finish(self, indices):
        """[tensor, gradient, tensor, gradient, ...] for a Seed: features with their graph, and the gradients of their leaves. Frees the features of
        these images, which no later item needs."""
        pairs = []
        for index in indices:
            if index in self.open:
                _, features, leaves = self.open.pop(index)
                pairs += [part for x, leaf in zip(features, leaves) if leaf.grad is not None for part in (x, leaf.grad)]
        return pairs


class ShardedTower:
    """Runs the vision tower of a sharded model for `own`, a list of (Tower, index of its inputs), on every rank. `begin` computes the
    features that `Tower.of_rows` reads. `within`: makes the context manager of every call.

    A rank with fewer inputs than another calls the tower with a stand-in, so that all ranks make the same number of calls.
    """

    def __init__(self, model, own, gradients, within=contextlib.nullcontext):
        self.model, self.base, self.own, self.gradients, self.within = model, base_model(model), own, gradients, within
        told = ranks.told_by_all(model, (len(self.own), _outline(self.own[0][0].images.inputs[0]) if self.own else None))
        self.calls = max(count for count, _ in told)
        self.outline = next((outline for _, outline in told if outline is not None), None)
        self.trains = False

    def begin(self):
        """Raises `Error` behind all calls, which the other ranks make, too, if images do not fit their tokens."""
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
