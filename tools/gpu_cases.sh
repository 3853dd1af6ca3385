#!/usr/bin/env bash
# The models and rollouts of tools/first_hour.py, into the folder $1, by the program $2 (default: build/espalier): a small model that the
# program made, with rollouts that it sampled, and shapes whose weights are random.
set -euo pipefail
out=$1 program=${2:-build/espalier}
rm -rf "$out"
mkdir -p "$out"
"$program" grpo --quiet --out "$out/run" --prompt-length 64 --max-response-length 8 --train-batch-size 4 --n 8 \
  --steps 1 --warm-start-steps 2 >/dev/null
mv "$out/run/model" "$out/model"
rm -rf "$out/model/espalier"
mv "$out/run/last_rollouts.jsonl" "$out/rollouts.jsonl"
rm -rf "$out/run"
# Rewards of a model that has learned nothing are alike, and then every gradient is zero.
tools/python - "$out/rollouts.jsonl" <<'END'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
for number, record in enumerate(records):
    record["reward"] = number * 5 % 8 / 8
open(sys.argv[1], "w").write("".join(json.dumps(record) + "\n" for record in records))
END
cat >"$out/llama3_8b_4_layers.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "rms_norm_eps": 1e-05,
 "rope_theta": 500000.0, "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": false}
END
sed 's/"num_hidden_layers": 4/"num_hidden_layers": 1/' "$out/llama3_8b_4_layers.json" >"$out/llama3_8b_1_layer.json"
cat >"$out/qwen3_8b.json" <<'END'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
 "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": false}
END
cat >"$out/tiny.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
 "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": false}
END
