"""Services between text and token ids beside the program: a model's tokenizer, reward functions, files of prompts.

The program runs `python -m espalier.texts tokenizer DIR` and `python -m espalier.texts reward FILE` as children that stay, and
`python -m espalier.texts prompts FILE` and `python -m espalier.texts retokenize DIR FILE` (`rows`, too) as ones that print. Only
the standard library is imported before it is known that more is needed: tokenizers for text, jinja2 for chat templates, pyarrow for Parquet.
"""
