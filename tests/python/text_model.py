"""Small random models with a tokenizer and a chat template of their own, made on the spot."""

import json

import tokenizers
import torch
import transformers

# ChatML, as Qwen's models have it, with what templates in the wild do: a default system message, a check, loops, filters.
CHAT_TEMPLATE = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
END = "<|im_end|>"


def byte_level_tokenizer(texts, size):
    """A byte-level BPE, as Qwen's and Llama 3's: any text has tokens, and a token may be part of a character."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>", "<|im_start|>", END],
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_tokenizer(words):
    """A word is a token; the end is special only by tokenizer_config.json."""
    vocabulary = {word: index for index, word in enumerate([END, "<|im_start|>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def make_text_model(directory, tokenizer, chat_template=CHAT_TEMPLATE, seed=1, initializer_range=0.1, kind="Qwen3", **more):
    settings = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
                    eos_token_id=None, pad_token_id=None, initializer_range=initializer_range)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**settings, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    if chat_template:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_lines(records, path):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
