"""Espalier from Python. Nothing is imported here: each module names what it needs.

espalier.records   rollouts recorded by other systems, read without executing what their files hold (no torch, no NumPy)
espalier.texts     the program's tokenizer and reward processes (tokenizers and jinja2, where prompts are text)
"""
