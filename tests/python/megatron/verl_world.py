"""verl's own Megatron worker on a CPU, in float64: the parts that need a GPU, and a configuration.

    local layers of Megatron-Core in mbridge's place for Transformer Engine's, drawn weights instead of a checkpoint's
"""

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "examples")]
os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu,espalier.verl", VERL_USE_EXTERNAL_PLUGINS="none", HF_HUB_OFFLINE="1",
                  TOKENIZERS_PARALLELISM="false")

import cpu  # noqa: E402, F401  before megatron
import torch  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402

import mbridge.core.bridge  # noqa: E402
import mbridge.core.llm_bridge  # noqa: E402
import mbridge.core.util  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils.megatron_utils import unwrap_model  # noqa: E402
from verl.utils.torch_dtypes import PrecisionType  # noqa: E402
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead  # noqa: E402

from models import Causal, Norm, draw  # noqa: E402

if not hasattr(mbridge.core.util.ModelType, "encoder_and_decoder"):  # mbridge 0.15.1 asks for a member that megatron-core 0.19 no longer has
    mbridge.core.util.ModelType.encoder_and_decoder = None
EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(MegatronEngineWithLMHead)
narrow = PrecisionType.to_dtype
PrecisionType.to_dtype = staticmethod(lambda precision: torch.float64 if precision in ("float64", torch.float64, "bfloat16") else narrow(precision))
OFF = dict(masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
           apply_rope_fusion=False, persist_layer_norm=False, use_cpu_initialization=True)


def local_layers(self, vp_stage=None):
    self.has_vp_stage = True
    spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm", **({} if vp_stage is None else {"vp_stage": vp_stage}))
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = Causal
        for owner, names in ((parts, ("input_layernorm", "pre_mlp_layernorm")), (attention, ("q_layernorm", "k_layernorm"))):
            for name in names:
                if "Identity" not in str(getattr(owner, name, None) or "Identity"):
                    setattr(owner, name, Norm)
    spec.layer_norm = Norm
    return spec


mbridge.core.llm_bridge.LLMBridge._get_transformer_layer_spec = local_layers
mbridge.core.bridge.Bridge.load_weights = lambda self, chunks, path, *_, **__: draw([unwrap_model(chunk) for chunk in chunks])


def write_model(folder, tied=False):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    Qwen3ForCausalLM(Qwen3Config(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                 head_dim=16, tie_word_embeddings=tied)).save_pretrained(folder)


def configurations(folder, transformer=None, **changes):
    """verl's configuration of the model, the engine and the optimizer. `transformer`: fields of Megatron's config."""
    model = HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=True, enable_gradient_checkpointing=False)
    object.__setattr__(model, "tokenizer", types.SimpleNamespace(pad_token_id=0))
    engine = McoreEngineConfig(**{**dict(use_mbridge=True, vanilla_mbridge=True, use_remove_padding=True, use_dynamic_bsz=True, max_token_len_per_gpu=160,
                                         infer_max_token_len_per_gpu=160, override_ddp_config={"grad_reduce_in_fp32": False},
                                         override_transformer_config={**OFF, **(transformer or {})}), **changes})
    return dict(model_config=model, engine_config=engine, checkpoint_config=CheckpointConfig(),
                optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=10, clip_grad=0.0))
