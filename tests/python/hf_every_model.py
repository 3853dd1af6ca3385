"""A tiny random model of every class that transformers' mapping for causal language models holds.

`SMALL` holds sizes by the names that families give them; a config takes those that it has, its parts too. `CHANGES` holds what a
family needs besides: a layer of each kind, sizes that fit each other.
"""

import json
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import espalier.hf
from hf_models import all_float64, batch, dense_step, gradients, loss_of, shared_step

VOCABULARY = 97
WINDOW = 16

SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, d_model=32, n_embd=32, dim=32, embedding_size=32, word_embed_proj_dim=32, emb_dim=32,
    intermediate_size=48, d_ff=48, ffn_dim=48, n_inner=48, decoder_ffn_dim=48, encoder_ffn_dim=48, dff=48, ffn_hidden_size=48, dim_ff=48,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=2, num_decoder_layers=2, num_encoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=512, n_positions=512, max_target_positions=512, n_ctx=512, max_seq_len=512,
    sliding_window=WINDOW, attention_window_size=WINDOW, window_size=WINDOW, attention_chunk_size=WINDOW, local_attention=WINDOW,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2, moe_k=2, top_k_experts=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, shared_experts_intermediate_size=16, n_shared_experts=1, n_group=1,
    topk_group=1, first_k_dense_replace=1, shared_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, index_head_dim=8, index_n_heads=16, index_topk=8,
    is_decoder=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=.15, init_std=.15,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_head_dim=8, linear_num_heads=4,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
    state_size=8, mamba_expand=2, chunk_size=16, mamba_chunk_size=16,
    floor_scale=8, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, laurel_rank=8,
    dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, activation_dropout=0.0, classifier_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layerdrop=0.0, decoder_layerdrop=0.0, resid_dropout=0.0,
    embed_dropout=0.0, ffn_dropout=0.0, embedding_dropout=0.0, attention_dropout_prob=0.0,
)
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
QSA = dict(HYBRID, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
REUSED = dict(num_kv_shared_layers=2, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
MLA = dict(num_key_value_heads=4)
DOTS = dict(MLA, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_head_dim=16,
            swa_qk_nope_head_dim=8, swa_v_head_dim=12)
VISION = dict(image_size=16, patch_size=8, num_channels=3)
CHANGES = {
    "axk1": MLA, "axk2": MLA, "sarvam_mla": MLA, "deepseek_v2": MLA, "deepseek_v3": MLA, "deepseek_v32": MLA, "glm4_moe_lite": MLA, "glm_moe_dsa": MLA,
    "longcat_flash": MLA, "minicpm3": MLA, "youtu": MLA,
    "bailing_hybrid": {**HYBRID, **MLA}, "kimi_linear": {**HYBRID, **MLA}, "dots3_note": DOTS, "dots3_note_text": DOTS,
    "cohere_compass_text": dict(rope_parameters={kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
                                                for kind in ("full_attention", "sliding_attention")}), "dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8)), "blt": dict(encoder_hash_byte_group_vocab=97, encoder_config=dict(hidden_size_global=32), decoder_config=dict(hidden_size_global=32)),
    "gemma3n_text": dict(REUSED, activation_sparsity_pattern=[.95, 0., .95, 0.]), "gemma4_text": REUSED,
    "deepseek_v4": dict(compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8)),
    "minimax_m3_vl_text": dict(layer_types=["full_attention", "minimax_m3_sparse"], index_block_size=4, index_topk_blocks=2, dense_intermediate_size=48),
    "mpt": dict(attn_config=dict(attn_pdrop=0)), "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "recurrent_gemma": dict(num_hidden_layers=3, block_types=["recurrent", "attention"]),
    "gemma4_assistant": dict(text_config=dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2)),
    "gemma4_unified_assistant": dict(text_config=dict(num_kv_shared_layers=2)), "bamba": dict(attn_layer_indices=[1]), "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "granitemoehybrid": HYBRID, "lfm3": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "sliding_attention"]),
    "lfm2": dict(layer_types=["conv", "full_attention"]), "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "qwen3_5": HYBRID, "qwen3_5_text": HYBRID, "qwen3_5_moe": HYBRID, "qwen3_5_moe_text": HYBRID, "qwen3_next": HYBRID,
    "qwen4_exp": QSA, "qwen4_exp_text": QSA,
    "codegen": dict(rotary_dim=8), "gptj": dict(rotary_dim=8),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "mamba2": dict(num_heads=8, head_dim=8), "falcon_h1": dict(mamba_d_ssm=64),
    "zamba": dict(num_hidden_layers=4, layer_types=["linear_attention", "hybrid"] * 2),
    "zamba2": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2),
    "zaya": dict(num_experts_per_tok=1), "reformer": dict(is_decoder=True, axial_pos_embds=False),
}


TABLE = Path(__file__).with_name("hf_sweep.json")


def tables():
    """{release of transformers: {"exact", or the reason of a refusal: model types}}, the oldest release first."""
    return dict(sorted(json.loads(TABLE.read_text()).items(), key=lambda item: Version(item[0])))


def table():
    """That of the installed release, or of the newest one that is known."""
    known = tables()
    return known.get(transformers.__version__, list(known.values())[-1])


def _shrunk(config, **more):
    """The fields that a config of this kind takes."""
    fields = {}
    for field, value in SMALL.items():
        try:
            held = hasattr(config, field)
        except Exception:  # transformers refuses to say a field that differs by layer
            held = True
        if held and not isinstance(getattr(type(config), field, None), property):
            fields[field] = value
    for part in config.sub_configs:
        if getattr(config, part, None) is not None:
            inner = getattr(config, part)
            fields[part] = _shrunk(inner)
    for part, value in more.items():
        fields[part] = {**fields.get(part, {}), **value} if isinstance(value, dict) else value
    return fields


def _every_kind(config):
    """Lists by layer that give the tiny model one layer of each kind that `config`, a family's default, has: kinds of attention and MLP, layers
    without rotation, sparse activations. Lists of sizes are not among them."""
    text = config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    lists = {field: value for field, value in text.to_dict().items() if isinstance(value, list) and len(value) == depth
             and (isinstance(value[0], str) or field in ("no_rope_layers", "activation_sparsity_pattern"))}
    kinds = list(dict.fromkeys(zip(*lists.values())))
    if len(kinds) < 2:
        return {}
    fields = dict(zip(lists, map(list, zip(*kinds))), num_hidden_layers=len(kinds))
    return fields if text is config else next(({part: fields} for part in config.sub_configs if getattr(config, part, None) is text), {})


def config_of(name, **changes):
    kind = CONFIG_MAPPING[name]
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    text = kind.sub_configs.get("text_config")
    wanted = getattr(transformers, class_name).config_class
    if text is not None and wanted is text or class_name.startswith("Musicgen"):  # as AutoModelForCausalLM does
        kind = wanted
    more = CHANGES.get(name, {})
    if not any(field.endswith(("layer_types", "num_hidden_layers")) for field in more):
        more = {**_every_kind(kind()), **more}
    return kind(**{**_shrunk(kind(), **more), **changes}, experts_implementation="eager")


def build(name, **changes):
    """In float64, without dropout, in eval mode."""
    torch.manual_seed(1)
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])(config_of(name, **changes)).double().eval()


ROLLOUTS = batch(groups=((14, (7, 12, 9)), (12, (6, 4))), stem=0)
LENGTHS = sorted(len(r["prompt_ids"]) + len(r["response_ids"]) for r in ROLLOUTS)
ORIGINAL = 19  # between the lengths, for tables that change there; one more token, which a dense call leaves out, changes no side
assert LENGTHS == [16, 18, 21, 23, 26]
LOSS = loss_of(ROLLOUTS)
BOUND = 1e-9  # float64, a few layers: sums of at most 64 terms, each 1e-16 off, through a hundred operations
PLANS = {"packed": (4096, "keep"), "phased": (12, "keep"), "phased, recomputed": (12, "recompute")}


def distance(found, wanted):
    """The largest distance of a parameter's gradient, relative to its size, or to its share of the whole gradient's where rounding is all
    that a gradient is (a key's bias). Without a gradient is zero: the last token, which only shared rows hold, may be an expert's only one."""
    unlike = set(found) ^ set(wanted)
    assert not any(found.get(name, wanted.get(name)).any() for name in unlike), sorted(unlike)
    found, wanted = ({name: g for name, g in of.items() if name not in unlike} for of in (found, wanted))
    whole, elements = sum(float(g.square().sum()) for g in wanted.values()), sum(g.numel() for g in wanted.values())
    size = lambda g: max(float(g.norm()), (whole * g.numel() / elements) ** .5)
    return max(float((found[name] - g).norm()) / size(g) for name, g in wanted.items())


def shared_error(model):
    """{plan: the largest of the gradients', the losses' and the log-probs' relative distance from the dense step}, in float64."""
    steps, values = {}, {}
    with all_float64():
        for plan, (wave_tokens, trunk_state) in PLANS.items():
            result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=wave_tokens, trunk_state=trunk_state)
            assert result.schedule == plan.split(",")[0]
            if wave_tokens not in values:  # without gradients a trunk has no state
                values[wave_tokens] = torch.cat(espalier.hf.logprobs(model, ROLLOUTS, wave_tokens=wave_tokens))
            steps[plan] = gradients(model), result.loss, values[wave_tokens]
        loss, own = dense_step(model, ROLLOUTS, LOSS), gradients(model)
        logprobs = dense_logprobs(model)
    far = lambda a, b: float((a - b).abs().max() / b.abs().max())
    return {plan: max(distance(found, own), abs(total - loss) / abs(loss), far(values, logprobs)) for plan, (found, total, values) in steps.items()}


@torch.no_grad()
def dense_logprobs(model):
    out = []
    for record in ROLLOUTS:
        prompt, response = record["prompt_ids"], record["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
        out.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(out)
