"""Images in rollouts: the vision tower runs once for each different image, and image rows are rows like others, in prompts and in responses.

A rollout's `images` is the dict that the model's processor gives for all images of prompt and response, in the order of their tokens
(`pixel_values`, `image_grid_thw`, `image_sizes`, ...). Dicts are cut into images (image_parts.py), and equal images are one. The planner sees token
ids only, so each different image gets its own id for its placeholders: rollouts with equal tokens and different images share the rows before the first
image that differs.

Calls of the language model take the tower's features as leaves, through transformers' argument `mm_encoder_outputs` (towers.py). If the model has
`get_rope_index`, it gives the positions of all tokens up to the last image (M-RoPE: temporal, height, width), and later tokens count on from there.
"""

import hashlib
import inspect
import sys
import weakref

import numpy as np
import torch

from espalier.errors import Error, Unsupported
from espalier.hf import image_parts, probe, ranks
from espalier.hf.model_parts import base_model, decoder_config

FIELD = "images"
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # computed from the rollout's tokens instead
_passed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # base model: the modes (training or not) in which its images passed


def takes(model):
    """True if the model can take images."""
    return hasattr(base_model(model).base_model, "get_image_features")


def of(model, prepared):
    """The Images of these Rollouts, or None if no rollout has any."""
    return Images(model, prepared) if any(record.get(FIELD) for record in prepared.records) else None


class Images:
    """`of_rollout`: each rollout's images in the order of their tokens, as indices into `names`, `sizes` and `place`; () without images. `names`: a
    digest and the size of each different image, equal in every step. `sizes`: its number of features. `inputs`: the dicts with which the tower is called, one for
    images that always follow each other in prompts, or in responses. `sizes_of`: the numbers of their features. `place`: each image's (index into `inputs`,
    first row of its features). `keys`, `response_keys`: the tokens with the planner's ids, int32."""

    def __init__(self, model, prepared):
        self.model, self.base, self.device = model, base_model(model), ranks.device_of(model)
        self.backbone = self.base.base_model
        _check_family(model, self.base, self.backbone)
        self.token, self.vocabulary = _image_token(self.base), decoder_config(model).vocab_size
        self.mutual = _see_each_other(self.backbone)
        self.by_axes = hasattr(self.backbone, "get_rope_index")  # M-RoPE
        self.taken = set(inspect.signature(type(self.backbone).get_image_features).parameters)
        self.forward_takes = {name for part in (self.base, self.backbone) for name in inspect.signature(type(part).forward).parameters}
        self.prompts, self.tokens = prepared.prompts, [np.concatenate(parts) for parts in zip(prepared.prompts, prepared.responses)]
        self.at = [tokens == self.token for tokens in self.tokens]
        self.names, self.sizes, self._different, self._known, self._counted = [], [], [], {}, {}
        self.of_rollout = [self._read(i, record) for i, record in enumerate(prepared.records)]
        bundles = image_parts.chains(part for i, own in enumerate(self.of_rollout) for part in self._by_place(i, own))
        self.inputs = [{name: x.to(self.device) for name, x in image_parts.joined([self._different[i] for i in bundle]).items()} for bundle in bundles]
        self.place = {i: (index, sum(self.sizes[j] for j in bundle[:at])) for index, bundle in enumerate(bundles) for at, i in enumerate(bundle)}
        self.sizes_of = [[self.sizes[i] for i in bundle] for bundle in bundles]
        named = [self._named(i) for i in range(len(prepared))]
        self.keys = [ids[:len(prompt)] for ids, prompt in zip(named, self.prompts)]
        self.response_keys = [ids[len(prompt):] for ids, prompt in zip(named, self.prompts)]

    def _read(self, i, record):
        given, where, count = record.get(FIELD), f"rollouts[{i}]['{FIELD}']", int(self.at[i].sum())
        if not given:
            if count:
                raise Error("input", where, f"the dict of the model's processor, because the rollout has {count} image tokens", "none", "", 3)
            return ()
        _check_fields(given, where, self.taken)
        if not count:
            raise Error("input", f"rollouts[{i}]['prompt_ids']", f"image tokens (id {self.token}) in prompt or response", "none",
                        "Give the processor's input_ids", 3)
        tensors = {name: torch.as_tensor(given[name]) for name in given if name in self.taken and given[name] is not None}
        return tuple(self._image(*part) for part in image_parts.of(tensors, [end - begin for begin, end in self._runs(i)]))

    def _image(self, tensors, size):
        name = _digest(tensors), size
        if name not in self._known:
            self._known[name] = len(self.names)
            self.names.append(name)
            self.sizes.append(size)
            self._different.append(tensors)
        return self._known[name]

    def _by_place(self, i, own):
        """(images that begin in the prompt, images that begin in the response)."""
        begins = np.flatnonzero(self.at[i])[np.cumsum([0, *(self.sizes[j] for j in own)])[:-1]] if own else []
        count = int(np.sum(np.asarray(begins) < len(self.prompts[i])))
        return own[:count], own[count:]

    def _named(self, i):
        out = self.tokens[i].astype(np.int32)
        own = self.of_rollout[i]
        if own:
            out[self.at[i]] = self.vocabulary + np.repeat(np.array(own), [self.sizes[j] for j in own])
        return out

    def _runs(self, rollout):
        """[(begin, end)] of the runs of image tokens of a rollout."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.at[rollout], [False]])))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist()))

    def targets(self, ids):
        """The tokens that the planner's ids represent."""
        return np.where(ids >= self.vocabulary, self.token, ids)

    def positions(self, rollout, begin, end):
        """[A, end - begin] position ids of tokens [begin, end) of a rollout. A = 3 for a model with M-RoPE, else 1."""
        if not self.by_axes:
            return np.arange(begin, end)[None]
        if not self.of_rollout[rollout]:
            return np.broadcast_to(np.arange(begin, end), (3, end - begin))
        head = self.head(rollout)
        key = (self.of_rollout[rollout], head.tobytes())
        if key not in self._counted:
            self._counted[key] = self._count(rollout, head)
        counted = self._counted[key]
        after = np.arange(max(begin - len(head), 0), max(end - len(head), 0))
        return np.concatenate([counted[:, begin:min(end, len(head))], counted[:, -1:] + 1 + after], 1)

    def head(self, rollout):
        """The tokens of a rollout up to its last image, with the token behind it."""
        return self.tokens[rollout][:int(np.flatnonzero(self.at[rollout])[-1]) + 2]

    def _count(self, rollout, head):
        ids = torch.as_tensor(head, dtype=torch.long)[None]
        own = image_parts.joined([self._different[i] for i in self.of_rollout[rollout]])
        grids = {name: x.cpu() for name, x in own.items() if name == image_parts.GRID}
        positions, _ = self.backbone.get_rope_index(ids, mm_token_type_ids=(ids == self.token).int(), **grids)
        return positions[:, 0].numpy()

    def rows(self, rollout, begin, end):
        """[(index into `inputs`, begin, end of rows of its features)] of the image tokens among [begin, end) of a rollout, in order."""
        own, at = self.of_rollout[rollout], self.at[rollout]
        first = int(at[:begin].sum())
        last, out, seen = first + int(at[begin:end].sum()), [], 0
        for image in own:
            size, (index, row) = self.sizes[image], self.place[image]
            low, high = max(first, seen), min(last, seen + size)
            if low < high:
                out.append((index, row + low - seen, row + high - seen))
            seen += size
        return out

    def names_of(self, rollout, begin, end):
        """The digests of the images with tokens among [begin, end) of a rollout."""
        found = np.unique(np.cumsum(self.at[rollout])[begin:end][self.at[rollout][begin:end]] - 1)
        ends = np.cumsum([self.sizes[i] for i in self.of_rollout[rollout]])
        return tuple(self.names[self.of_rollout[rollout][j]] for j in np.unique(np.searchsorted(ends, found, side="right")))

    def blocks(self, rollout, begin, end):
        """[(begin, end)] of the runs of image tokens in [begin, end) of a rollout, whose rows see each other. Empty if the model's image rows are
        causal. Raises `Unsupported` if [begin, end) cuts a run."""
        if not self.mutual:
            return []
        found = [(b, e) for b, e in self._runs(rollout) if b < end and e > begin]
        if any(b < begin or e > end for b, e in found):
            raise Unsupported(type(self.base).__name__, "an image's rows in one call, because they all see each other", "an image split by a trunk",
                              f"Raise wave_tokens to {max(e for _, e in found)} or more")
        return found

    def dense_inputs(self, rollout, length):
        """The image arguments for a plain call with the first `length` tokens of this rollout, or with more of padding."""
        own = self.of_rollout[rollout]
        if not own:
            return {}
        kinds = torch.zeros(1, length, dtype=torch.long, device=self.device)
        at = torch.as_tensor(self.at[rollout], device=self.device)
        kinds[0, :len(at)] = at
        kinds = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in self.forward_takes}
        tensors = image_parts.joined([self._different[i] for i in own])
        return {**{name: x.to(self.device) for name, x in tensors.items()}, **kinds}


_OTHER_MEDIA = {"videos": ("video",), "audio": ("audio", "input_features", "feature_attention_mask")}  # parts of their fields' names


def _check_fields(given, where, taken):
    """Raises `Unsupported` for a dict with anything but images."""
    for kind, words in _OTHER_MEDIA.items():
        found = [name for name, x in given.items() if x is not None and any(word in name for word in words)]
        if found:
            raise Unsupported(where, "images alone, because no tower of videos or audio runs", f"{kind} ({', '.join(found)})",
                              "Run rollouts with videos or audio through the model's own calls")
    unknown = sorted(set(given) - _OF_TOKENS - taken)
    if unknown or "pixel_values" not in given:
        raise Unsupported(where, "pixel_values and other arguments of the model's get_image_features", ", ".join(unknown) or ", ".join(given))


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
        raise Unsupported(name, "images as rows of the sequence, from get_image_features and by mm_encoder_outputs", "a model with images of another kind")
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
    """The shortest beginning of a rollout that has all of its images: {"prompt_ids", "images"}. None if no rollout has images."""
    which = prepared.images.of_rollout if prepared.images is not None else []
    heads = {i: prepared.images.head(i) for i, own in enumerate(which) if own}
    if not heads:
        return None
    place = min(heads, key=lambda i: len(heads[i]))
    return dict(prompt_ids=heads[place], images=prepared.records[place][FIELD])


def check(model, prompt, dense, shared):
    """Compares the model's own calls with shared ones, for a beginning with images and two continuations: their log-probs and entropies, with the
    limit of probe.py. Raises `Unsupported` if they differ by more. `dense(rollouts, seen)` and `shared(rollouts, seen)` run rollouts without
    gradients. Called once for each model."""
    base = base_model(model)
    records = [dict(prompt, response_ids=ids[probe.BEGINNING:]) for ids in probe.sequences(base, without=(_image_token(base),))]

    def run(how):
        found = {}
        how(records, lambda wave: found.update({i: torch.stack([wave.logprobs, wave.entropies])[:, wave.rollout == i] for i in wave.rollouts}))
        return torch.cat([found[i] for i in sorted(found)], 1).double()

    with probe.named(type(base).__name__, "images"), probe.quiet(model), torch.no_grad():
        own = run(dense)
        with probe.nudged(base.get_input_embeddings()):
            rounding = float((run(dense) - own).norm())
        error = float((run(shared) - own).norm())
    layers = getattr(decoder_config(base), "num_hidden_layers", 1)
    if not error <= 2 * (layers + 1) ** .5 * rounding:
        raise Unsupported(type(base).__name__, "image rows that responses read only through attention",
                          f"log-probs of shared rows that differ by {error:.1e} from the model's own; rounding explains {rounding:.1e}")
    _passed.setdefault(base, set()).add(base.training)
