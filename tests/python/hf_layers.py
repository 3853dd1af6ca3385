"""Small models whose layers are more than plain causal attention, and the ways in which a step of them is cut.

`errors(model, case)` is the measure of test_hf_windows.py and test_hf_states.py.
"""

import functools
import random

import torch

from hf_models import COMMON, all_float64, dense_step, gradients, loss_of, shared_step, worst

WINDOW = 8
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager")
_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
_SLIDING = dict(sliding_window=WINDOW, layer_types=KINDS)

# name: (class, config, what it is told)
WINDOWED = {
    "Mistral": ("Mistral", "Mistral", dict(sliding_window=WINDOW)),
    "Ministral": ("Ministral", "Ministral", _SLIDING),
    "Phi-3": ("Phi3", "Phi3", dict(sliding_window=WINDOW)),
    "Qwen 3": ("Qwen3", "Qwen3", dict(_SLIDING, use_sliding_window=True)),
    "SmolLM 3": ("SmolLM3", "SmolLM3", dict(_SLIDING, use_sliding_window=True)),
    "OLMo 3": ("Olmo3", "Olmo3", _SLIDING),
    "Exaone 4": ("Exaone4", "Exaone4", dict(_SLIDING, sliding_window_pattern=2)),
    "Cohere 2": ("Cohere2", "Cohere2", _SLIDING),
    "Gemma 2": ("Gemma2", "Gemma2", dict(_SLIDING, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)),
    "Gemma 3": ("Gemma3", "Gemma3Text", dict(_SLIDING, query_pre_attn_scalar=16)),
    "gpt-oss": ("GptOss", "GptOss", dict(_SLIDING, num_local_experts=4, **_MOE, **_ROPE)),
    "Llama 4": ("Llama4", "Llama4Text", dict(
        attention_chunk_size=WINDOW, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1], floor_scale=4, attn_scale=.3, experts_implementation="eager")),
    "DeepSeek-V3": ("DeepseekV3", "DeepseekV3", dict(
        q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=4, head_dim=8,
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, **_MOE)),
}

_DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12,
              layer_types=["linear_attention", "full_attention", "linear_attention"])
_CONV = dict(layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
_MAMBA = dict(mamba_n_heads=8, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_n_groups=2, mamba_d_head=16, mamba_chunk_size=16)

RECURRENT = {
    "Qwen3-Next": ("Qwen3Next", "Qwen3Next", dict(_DELTA, num_experts=0)),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5Text", _DELTA),
    "Qwen3.5-MoE": ("Qwen3_5Moe", "Qwen3_5MoeText", dict(_DELTA, num_experts=4, shared_expert_intermediate_size=24, **_MOE)),
    "OLMo Hybrid": ("OlmoHybrid", "OlmoHybrid", _DELTA),
    "Kimi Linear": ("KimiLinear", "KimiLinear", dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=4, head_dim=8,
        num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, num_experts=4, n_routed_experts=4,
        n_group=1, topk_group=1, first_k_dense_replace=1, **_MOE)),
    "LFM2": ("Lfm2", "Lfm2", dict(_CONV, block_auto_adjust_ff_dim=False)),
    "LFM2-MoE": ("Lfm2Moe", "Lfm2Moe", dict(_CONV, num_experts=4, num_dense_layers=1, **_MOE)),
    "Bamba": ("Bamba", "Bamba", dict(_MAMBA, attn_layer_indices=[1], attn_rotary_emb=16)),
    "Falcon-H1": ("FalconH1", "FalconH1", dict(_MAMBA, mamba_d_ssm=128)),
    "Nemotron-H": ("NemotronH", "NemotronH", dict(
        layers_block_type=["mamba", "attention", "moe"], mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2,
        conv_kernel=4, chunk_size=16, n_routed_experts=4, moe_shared_expert_intermediate_size=16, **_MOE)),
    "Granite 4": ("GraniteMoeHybrid", "GraniteMoeHybrid", dict(
        _MAMBA, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, shared_intermediate_size=32, **_MOE)),
    "Jamba": ("Jamba", "Jamba", dict(
        mamba_d_state=4, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, experts_implementation="eager")),
}


def make(name, dtype=torch.float64, **changes):
    """Weights of states are drawn so that much is forgotten and much is kept."""
    import transformers
    kind, config, told = {**WINDOWED, **RECURRENT}[name]
    torch.manual_seed(1)
    common = {**COMMON, "num_hidden_layers": 3, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config + "Config")(**{**common, **told, **changes})
    model = getattr(transformers, kind + "ForCausalLM")(config).to(dtype).train()
    generator = torch.Generator().manual_seed(3)
    for parameter_name, p in model.named_parameters():
        if parameter_name.endswith("A_log"):
            p.data.uniform_(-2, 1, generator=generator)
        elif parameter_name.endswith(("dt_bias", ".D", "sinks")) or "conv" in parameter_name:
            p.data.normal_(0, .4, generator=generator)
    for module in model.modules():  # rotary tables and the like, which stay in float32
        for buffer_name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, buffer_name, buffer.to(dtype))
    return model


def rollouts(prompt, *responses, seed=1):
    """Of token counts: a prompt, and responses as tuples of stems (name, tokens) and tokens of their own."""
    draw = random.Random(seed)
    fresh = lambda n: [draw.randrange(3, 97) for _ in range(n)]
    stems, tokens = {}, fresh(prompt)
    parts = lambda response: [stems.setdefault(part[0], fresh(part[1])) if isinstance(part, tuple) else fresh(part) for part in response]
    return [dict(prompt_ids=tokens, response_ids=sum(parts(response), [])) for response in responses]


ROLLOUTS = [
    *rollouts(30, (("a", 6), ("b", 5), 7), (("a", 6), ("b", 5), 3), (("a", 6), 9), (1,), (("a", 6), ("b", 5), ("c", 2), 4), seed=1),
    *rollouts(11, (("a", 3), 9), (("a", 3), ("b", 2), 6), (4,), seed=2),  # forks inside the window
    *rollouts(2, (("a", 1), ("b", 3), 9), (("a", 1), ("b", 3), 2), (("a", 1), 5), (4,), seed=3),  # shorter than a convolution's tail
]
LOSS = loss_of(ROLLOUTS)
CASES = {  # what the step is told, and what its plan must then hold (test_hf_states.py)
    "packed": dict(wave_tokens=4096),
    "phased": dict(wave_tokens=40),
    "phased, prompts recomputed": dict(wave_tokens=40, trunk_state="recompute"),
    "trees of depth 3": dict(wave_tokens=14),
    "waves of one response": dict(wave_tokens=4),
}


@functools.cache
def model_and_dense(name):
    """A model, and the loss and the gradients of the unmodified model, rollout by rollout."""
    model = make(name)
    if not model._supports_sdpa:
        model.set_attn_implementation("eager")
    with all_float64():
        loss = dense_step(model, ROLLOUTS, LOSS)
    return model, loss, gradients(model)


def errors(name, case):
    """(largest relative distance of a parameter's gradient, or of the loss, from the unmodified model's, the parameter)."""
    model, wanted_loss, wanted = model_and_dense(name)
    with all_float64():
        result = shared_step(model, ROLLOUTS, LOSS, **CASES[case])
    assert result.rows < result.rows_without_sharing
    found, parameter = worst(gradients(model), wanted)
    return max(found, abs(result.loss - wanted_loss) / abs(wanted_loss)), parameter
