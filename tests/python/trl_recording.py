"""What a trainer of TRL's does, kept for comparisons."""


def recorded(trainer_class):
    """A trainer with `losses` of every micro-batch and `grads` of every window, {name: gradient} before the optimizer's step."""

    class Recorded(trainer_class):
        losses, grads = [], []

        def training_step(self, *args, **kwargs):
            out = super().training_step(*args, **kwargs)
            self.losses.append(out.item())
            if self.accelerator.sync_gradients:
                self.grads.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
            return out

    return Recorded
