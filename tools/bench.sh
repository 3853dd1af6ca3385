#!/usr/bin/env bash
# make bench: dense, packed, phased and auto on one model shape, hidden 512, 8 layers, 8/2 heads of 64, inner 1536,
# vocabulary 8192, random weights. ARGUMENTS goes to `espalier bench` and may name another grid or a model.
# Where transformers is installed, bench/compare_dense.py holds the result against plain PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/bench
cat >build/bench/config.json <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8,
 "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 8192,
 "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": false,
 "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu", "dtype": "float32"}
JSON
# shellcheck disable=SC2086
build/espalier bench --model build/bench --splits 341/1707,1024/1024,1365/683,1707/341 --n 8 ${ARGUMENTS-}
echo
echo "against plain PyTorch: tools/python bench/compare_dense.py   (after make test, which installs transformers)"
