"""Espalier's Python package. Importing it is cheap: each part is imported on first use.

espalier.train(...), plan, verify, score, ...   the program's verbs (keyword arguments are its options)
espalier.texts     the program's tokenizer and reward processes (need tokenizers, and jinja2 for chat templates)
espalier.hf        shared prompts around an unmodified transformers model (torch >= 2.6, transformers)
espalier.trl       TRL's GRPO, RLOO, DPO, KTO, reward and SFT trainers with shared prompts
espalier.verl      verl's FSDP2 engine with shared prompts
espalier.records   rollouts recorded by other systems, read without executing their content (no torch, no NumPy)
"""

from espalier.errors import Error, Unsupported

_VERBS = ("inspect", "plan", "train", "score", "verify", "replay", "bench", "generate", "grpo", "report", "doctor")
__all__ = ["Error", "Unsupported", *_VERBS]
__version__ = "0.1.0"


def __getattr__(name):
    if name in _VERBS:
        from espalier import verbs
        return getattr(verbs, name)
    raise AttributeError(f"module 'espalier' has no attribute {name!r}")
