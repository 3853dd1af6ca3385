#!/usr/bin/env bash
# verl's GRPO with shared prompts: verl_grpo.sh MODEL TRAIN_PARQUET VAL_PARQUET [more of verl's options]
#
# Three lines differ from a plain run: the engine (in the environment of every worker), FSDP2, and groups that stay on one rank
# (use_prefix_grouper makes verl balance ranks by whole groups; without it prompts are shared among what is left of a group).
set -eu
model=$1 train=$2 val=$3
shift 3
exec python -m verl.trainer.main_ppo \
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=espalier \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_prefix_grouper=True \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" \
    data.val_files="$val" \
    data.train_batch_size=128 \
    data.max_prompt_length=2048 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=1 \
    "$@"
