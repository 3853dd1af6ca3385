"""Python services of the program: a model's tokenizer, reward functions, environments, files of prompts and of text.

The program keeps `python -m espalier.texts tokenizer DIR` and `python -m espalier.texts reward FILE` running as child processes. It runs
`python -m espalier.texts prompts FILE`, `retokenize DIR FILE` and `rows OBJECTIVE DIR COLUMNS FILE` once and reads their output. Packages beyond the
standard library are imported only when they are needed: tokenizers for text, jinja2 for chat templates, pyarrow for Parquet.
"""
