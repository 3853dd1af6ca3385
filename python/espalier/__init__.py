"""Espalier from Python. Importing the package imports nothing heavy: each part is loaded where it is first used.

espalier.records   rollouts recorded by other systems, read without executing what their files hold (no torch, no NumPy)
espalier.texts     the program's tokenizer and reward processes (tokenizers and jinja2, where prompts are text)
espalier.hf        shared prompts around an unmodified transformers model (torch >= 2.6, transformers)
"""

from espalier.errors import Error, Unsupported

__all__ = ["Error", "Unsupported"]
__version__ = "0.1.0"
