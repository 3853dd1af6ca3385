# Made from the option table by tools/verb_stubs.py (`make docs`). A class holds the options of one section that the same verbs take.
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

_Path = str | PathLike[str]
_Numbers = float | str | Sequence[float]
_Records = Sequence[Mapping[str, Any]]

NAMES: tuple[str, ...]
POSITIONAL: dict[str, str]

def run(verb: str, *files: _Path | _Records, **options: Any) -> dict[str, Any]: ...

class Run(TypedDict, total=False):
    threads: int | None
    device: Literal["cpu", "cuda"] | None
    attention: Literal["auto", "own", "flash", "cudnn", "hopper", "hopper-split"] | None
    seed: int | None

class RunButInspectReportDoctor(TypedDict, total=False):
    deterministic: Literal["on", "off"] | None

class RunButInspectReport(TypedDict, total=False):
    dtype: Literal["float64", "float32", "bfloat16"] | None
    products: Literal["auto", "own", "library"] | None

class InputAndOutputButReport(TypedDict, total=False):
    model: _Path | None

class InputAndOutputPlanTrainScoreVerifyBench(TypedDict, total=False):
    rollouts: _Path | Sequence[_Path] | _Records | None

class InputAndOutputButInspectVerifyReplayBenchDoctor(TypedDict, total=False):
    out: _Path | None

class InputAndOutput(TypedDict, total=False):
    resume: _Path | None
    save_freq: int | None
    record: _Path | None
    record_every: int | None
    save_dtype: Literal["source", "float64", "float32", "bfloat16"] | None

class InputAndOutputTrainScoreGenerateGrpo(TypedDict, total=False):
    overwrite: bool | None

class InputAndOutputButInspectReplayBenchReportDoctor(TypedDict, total=False):
    columns: str | None

class InputAndOutputTrain(TypedDict, total=False):
    gradients: _Path | None
    logprobs: _Path | None
    rollout_metrics: _Path | None

class InputAndOutputTrainBench(TypedDict, total=False):
    profile: bool | None

class InputAndOutputScore(TypedDict, total=False):
    as_: Literal["logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"] | None
    entropies: bool | None
    values: bool | None

class MinibatchesPlanTrainVerifyReplayGrpo(TypedDict, total=False):
    mini_batch_size: int | None

class Minibatches(TypedDict, total=False):
    epochs: int | None
    steps: int | None

class Schedule(TypedDict, total=False):
    schedule: Literal["auto", "dense", "packed", "phased"] | None
    trunk_state: Literal["auto", "keep", "recompute", "offload"] | None
    wave_state: Literal["auto", "keep", "recompute"] | None
    path_state: Literal["auto", "keep", "offload", "divide", "latents", "latents-offload", "latents-divide"] | None
    spill_dir: str | None

class ScheduleButInspectReport(TypedDict, total=False):
    token_budget: int | None
    memory_budget: str | int | None

class ScheduleButGenerateReportDoctor(TypedDict, total=False):
    share: Literal["auto", "prompt", "off"] | None

class SchedulePlan(TypedDict, total=False):
    machine: str | None
    explain: bool | None
    frontier: bool | None

class ObjectivePlanTrainVerify(TypedDict, total=False):
    objective: Literal["grpo", "dpo", "reward", "sft"] | None

class ObjectiveTrainVerify(TypedDict, total=False):
    dpo_loss: Literal["sigmoid", "hinge", "ipo", "robust"] | None
    dpo_beta: float | None
    label_smoothing: float | None
    reference_free: bool | None
    center_rewards_coefficient: float | None

class ObjectiveTrain(TypedDict, total=False):
    ref_model: _Path | None

class Objective(TypedDict, total=False):
    adv_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "given"] | None
    adv_epsilon: float | None
    adv_std: Literal["group", "batch"] | None
    turn_rewards: Literal["auto", "outcome", "sum"] | None
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float | None
    tau_pos: float | None
    tau_neg: float | None
    dppo_mask_low: float | None
    dppo_mask_high: float | None
    kl_tau: float | None
    icepop_ratio_low: float | None
    icepop_ratio_high: float | None
    adv_tau: float | None
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"] | None
    loss_scale_factor: float | None
    kl_loss_coef: float | None
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "k3_unbounded", "k3_unbiased"] | None
    entropy_coeff: float | None
    opd_kl_coef: float | None
    opd_kl_clip: float | None
    rollout_is_mode: Literal["truncate", "mask"] | None
    rollout_is_threshold: float | None
    rollout_rs: str | None
    rollout_rs_threshold: str | None
    gamma: float | None
    lam: float | None

class ObjectiveButInspectScoreGenerateReportDoctor(TypedDict, total=False):
    policy_loss: Literal["vanilla", "gspo", "cispo", "sapo", "vespo", "gpg", "reinforce", "dppo_tv", "dppo_kl", "dppo", "icepop"] | None
    ratio_level: Literal["token", "sequence"] | None
    loss_unit: Literal["auto", "record", "trajectory"] | None
    shared_tokens: Literal["once", "average", "each"] | None
    rollout_is: Literal["none", "token", "sequence", "seq-mask-tis"] | None
    router_aux_loss_coef: float | None
    router_aux_loss_scope: Literal["rollout", "minibatch"] | None
    router_z_loss_coef: float | None

class ObjectiveGrpo(TypedDict, total=False):
    teacher_model: _Path | None

class TrlsFormulas(TypedDict, total=False):
    group_of_one: Literal["reward", "zero"] | None
    ratio_cap: float | None
    log_ratio_bound: float | None
    vespo_weights: _Numbers | None
    token_mean_divisor: float | None
    token_divisor_scale: float | None
    token_count_epsilon: float | None
    entropy_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"] | None
    rollout_is_floor: float | None

class TrlsFormulasButInspectScoreGenerateReportDoctor(TypedDict, total=False):
    off_policy_threshold: float | None

class TrlsFormulasTrainVerifyReplayGrpo(TypedDict, total=False):
    decay_matrices_only: bool | None

class CriticPlanTrainScoreVerifyGrpo(TypedDict, total=False):
    critic: _Path | None

class Critic(TypedDict, total=False):
    cliprange_value: float | None
    critic_lr: float | None

class OptimizerButInspectScoreGenerateReportDoctor(TypedDict, total=False):
    train: str | None

class Optimizer(TypedDict, total=False):
    lr: float | None
    betas: _Numbers | None
    eps: float | None
    weight_decay: float | None
    max_grad_norm: float | None
    warmup_steps: int | None
    lr_scheduler_type: Literal["constant", "linear", "cosine"] | None
    lr_min_ratio: float | None
    lr_total_steps: int | None

class Adapters(TypedDict, total=False):
    lora_rank: int | None
    lora_alpha: float | None
    lora_target: str | None
    lora_dropout: float | None
    use_rslora: bool | None

class AdaptersButInspectReport(TypedDict, total=False):
    adapter: _Path | None
    weights: Literal["source", "nf4", "fp8"] | None

class ParallelDegrees(TypedDict, total=False):
    tp: int | None
    ep: int | None
    cp: int | None
    pp: int | None
    dp: int | None

class ParallelDegreesButInspectGenerateReportDoctor(TypedDict, total=False):
    shard: Literal["none", "optimizer", "full"] | None

class ParallelDegreesPlanTrainScoreVerify(TypedDict, total=False):
    layout: Literal["given", "auto"] | None

class ParallelDegreesPlan(TypedDict, total=False):
    ranks: int | None

class ParallelDegreesButInspectPlanReportDoctor(TypedDict, total=False):
    comm_timeout: float | None

class Sampling(TypedDict, total=False):
    prompts: _Path | _Records | None
    reward: _Path | Callable[..., Any] | None
    reward_timeout: float | None
    env: _Path | None
    turns: int | None
    observations: Literal["append", "render"] | None
    top_k: int | None
    top_p: float | None
    stop: _Path | Sequence[_Path] | None
    chat_template_kwargs: str | None
    stop_ids: _Numbers | None
    max_num_seqs: int | None

class SamplingPlanBenchGenerateGrpo(TypedDict, total=False):
    n: _Numbers | None

class SamplingButInspectPlanReport(TypedDict, total=False):
    temperature: float | None

class SamplingButInspectReportDoctor(TypedDict, total=False):
    kept_sets: Literal["auto", "ignore"] | None

class SamplingPlanGenerateGrpo(TypedDict, total=False):
    max_response_length: int | None

class ClosedLoop(TypedDict, total=False):
    task: Literal["retrieval", "recite", "arithmetic", "copy"] | None
    fresh: Literal["dense", "moe"] | None
    val_prompts: _Path | _Records | None
    prompt_length: int | None
    train_batch_size: int | None
    val_size: int | None
    test_freq: int | None
    warm_start_steps: int | None
    warm_start_lr: float | None
    filter_groups: bool | None
    max_num_gen_batches: int | None
    overlong_buffer_len: int | None
    overlong_penalty_factor: float | None
    expect_accuracy: float | None

class ClosedLoopTrainGrpo(TypedDict, total=False):
    logging_freq: int | None
    report_to: str | None

class ClosedLoopDoctor(TypedDict, total=False):
    sample: int | None

class ClosedLoopInspectGrpo(TypedDict, total=False):
    show: int | None

class BenchmarkGrid(TypedDict, total=False):
    splits: str | None
    repetitions: int | None

class EveryVerb(TypedDict, total=False):
    config: _Path | None
    quiet: bool
    dry_run: bool

class EveryVerbButTrainScoreGenerateGrpo(TypedDict, total=False):
    overwrite: bool

class NamesOfTrl(TypedDict, total=False):
    importance_sampling_level: Any
    loss_type: Any
    mask_truncated_completions: Any
    off_policy_mask_threshold: Any
    top_entropy_quantile: Any
    vllm_importance_sampling_correction: Any
    vllm_importance_sampling_mode: Any
    lora_modules_to_save: Any
    lora_r: Any
    lora_target_modules: Any
    lora_target_parameters: Any
    modules_to_save: Any
    target_modules: Any
    target_parameters: Any
    exclude_modules: Any
    layers_to_transform: Any
    layers_pattern: Any
    rank_pattern: Any
    alpha_pattern: Any
    use_dora: Any
    lora_bias: Any

class NamesOfTrlButInspectScoreReportDoctor(TypedDict, total=False):
    max_completion_length: Any

class NamesOfTrlButInspectReport(TypedDict, total=False):
    lora_adapter_path: Any

class NamesOfTrlTrainVerifyReplayBenchGrpo(TypedDict, total=False):
    beta: Any
    delta: Any
    entropy_coef: Any
    epsilon: Any
    epsilon_high: Any
    gradient_accumulation_steps: Any
    multi_objective_aggregation: Any
    num_items_in_batch: Any
    sapo_temperature_neg: Any
    sapo_temperature_pos: Any
    scale_rewards: Any
    steps_per_generation: Any
    use_adaptive_entropy: Any
    use_bias_correction_kl: Any
    vespo_k_neg: Any
    vespo_k_pos: Any
    vespo_lambda_neg: Any
    vespo_lambda_pos: Any
    vllm_importance_sampling_cap: Any
    vllm_importance_sampling_clip_max: Any
    vllm_importance_sampling_clip_min: Any

class InspectOptions(Run, InputAndOutputButReport, ScheduleButGenerateReportDoctor, ClosedLoopInspectGrpo, EveryVerb,
    EveryVerbButTrainScoreGenerateGrpo): ...

class PlanOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputPlanTrainScoreVerifyBench, InputAndOutputButInspectVerifyReplayBenchDoctor,
    InputAndOutputButInspectReplayBenchReportDoctor, MinibatchesPlanTrainVerifyReplayGrpo, Schedule, ScheduleButInspectReport,
    ScheduleButGenerateReportDoctor, SchedulePlan, ObjectivePlanTrainVerify, ObjectiveButInspectScoreGenerateReportDoctor,
    TrlsFormulasButInspectScoreGenerateReportDoctor, CriticPlanTrainScoreVerifyGrpo, OptimizerButInspectScoreGenerateReportDoctor,
    Adapters, AdaptersButInspectReport, ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor,
    ParallelDegreesPlanTrainScoreVerify, ParallelDegreesPlan, SamplingPlanBenchGenerateGrpo, SamplingButInspectReportDoctor,
    SamplingPlanGenerateGrpo, EveryVerb, EveryVerbButTrainScoreGenerateGrpo, NamesOfTrl, NamesOfTrlButInspectScoreReportDoctor,
    NamesOfTrlButInspectReport): ...

class TrainOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputPlanTrainScoreVerifyBench, InputAndOutputButInspectVerifyReplayBenchDoctor, InputAndOutput,
    InputAndOutputTrainScoreGenerateGrpo, InputAndOutputButInspectReplayBenchReportDoctor, InputAndOutputTrain,
    InputAndOutputTrainBench, MinibatchesPlanTrainVerifyReplayGrpo, Minibatches, Schedule, ScheduleButInspectReport,
    ScheduleButGenerateReportDoctor, ObjectivePlanTrainVerify, ObjectiveTrainVerify, ObjectiveTrain, Objective,
    ObjectiveButInspectScoreGenerateReportDoctor, TrlsFormulas, TrlsFormulasButInspectScoreGenerateReportDoctor,
    TrlsFormulasTrainVerifyReplayGrpo, CriticPlanTrainScoreVerifyGrpo, Critic, OptimizerButInspectScoreGenerateReportDoctor,
    Optimizer, Adapters, AdaptersButInspectReport, ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor,
    ParallelDegreesPlanTrainScoreVerify, ParallelDegreesButInspectPlanReportDoctor, SamplingButInspectPlanReport,
    SamplingButInspectReportDoctor, ClosedLoopTrainGrpo, EveryVerb, NamesOfTrl, NamesOfTrlButInspectScoreReportDoctor,
    NamesOfTrlButInspectReport, NamesOfTrlTrainVerifyReplayBenchGrpo): ...

class ScoreOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputPlanTrainScoreVerifyBench, InputAndOutputButInspectVerifyReplayBenchDoctor,
    InputAndOutputTrainScoreGenerateGrpo, InputAndOutputButInspectReplayBenchReportDoctor, InputAndOutputScore, Schedule,
    ScheduleButInspectReport, ScheduleButGenerateReportDoctor, CriticPlanTrainScoreVerifyGrpo, AdaptersButInspectReport,
    ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor, ParallelDegreesPlanTrainScoreVerify,
    ParallelDegreesButInspectPlanReportDoctor, SamplingButInspectPlanReport, SamplingButInspectReportDoctor, EveryVerb,
    NamesOfTrlButInspectReport): ...

class VerifyOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputPlanTrainScoreVerifyBench, InputAndOutputButInspectReplayBenchReportDoctor,
    MinibatchesPlanTrainVerifyReplayGrpo, Schedule, ScheduleButInspectReport, ScheduleButGenerateReportDoctor,
    ObjectivePlanTrainVerify, ObjectiveTrainVerify, Objective, ObjectiveButInspectScoreGenerateReportDoctor, TrlsFormulas,
    TrlsFormulasButInspectScoreGenerateReportDoctor, TrlsFormulasTrainVerifyReplayGrpo, CriticPlanTrainScoreVerifyGrpo, Critic,
    OptimizerButInspectScoreGenerateReportDoctor, Optimizer, Adapters, AdaptersButInspectReport, ParallelDegrees,
    ParallelDegreesButInspectGenerateReportDoctor, ParallelDegreesPlanTrainScoreVerify, ParallelDegreesButInspectPlanReportDoctor,
    SamplingButInspectPlanReport, SamplingButInspectReportDoctor, EveryVerb, EveryVerbButTrainScoreGenerateGrpo, NamesOfTrl,
    NamesOfTrlButInspectScoreReportDoctor, NamesOfTrlButInspectReport, NamesOfTrlTrainVerifyReplayBenchGrpo): ...

class ReplayOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    MinibatchesPlanTrainVerifyReplayGrpo, Minibatches, Schedule, ScheduleButInspectReport, ScheduleButGenerateReportDoctor,
    Objective, ObjectiveButInspectScoreGenerateReportDoctor, TrlsFormulas, TrlsFormulasButInspectScoreGenerateReportDoctor,
    TrlsFormulasTrainVerifyReplayGrpo, OptimizerButInspectScoreGenerateReportDoctor, Optimizer, Adapters,
    AdaptersButInspectReport, ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor,
    ParallelDegreesButInspectPlanReportDoctor, SamplingButInspectPlanReport, SamplingButInspectReportDoctor, EveryVerb,
    EveryVerbButTrainScoreGenerateGrpo, NamesOfTrl, NamesOfTrlButInspectScoreReportDoctor, NamesOfTrlButInspectReport,
    NamesOfTrlTrainVerifyReplayBenchGrpo): ...

class BenchOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputPlanTrainScoreVerifyBench, InputAndOutputTrainBench, Schedule, ScheduleButInspectReport,
    ScheduleButGenerateReportDoctor, Objective, ObjectiveButInspectScoreGenerateReportDoctor, TrlsFormulas,
    TrlsFormulasButInspectScoreGenerateReportDoctor, OptimizerButInspectScoreGenerateReportDoctor, Adapters,
    AdaptersButInspectReport, ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor,
    ParallelDegreesButInspectPlanReportDoctor, SamplingPlanBenchGenerateGrpo, SamplingButInspectPlanReport,
    SamplingButInspectReportDoctor, BenchmarkGrid, EveryVerb, EveryVerbButTrainScoreGenerateGrpo, NamesOfTrl,
    NamesOfTrlButInspectScoreReportDoctor, NamesOfTrlButInspectReport, NamesOfTrlTrainVerifyReplayBenchGrpo): ...

class GenerateOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputButInspectVerifyReplayBenchDoctor, InputAndOutputTrainScoreGenerateGrpo,
    InputAndOutputButInspectReplayBenchReportDoctor, ScheduleButInspectReport, AdaptersButInspectReport, ParallelDegrees,
    ParallelDegreesButInspectPlanReportDoctor, Sampling, SamplingPlanBenchGenerateGrpo, SamplingButInspectPlanReport,
    SamplingButInspectReportDoctor, SamplingPlanGenerateGrpo, EveryVerb, NamesOfTrlButInspectScoreReportDoctor,
    NamesOfTrlButInspectReport): ...

class GrpoOptions(Run, RunButInspectReportDoctor, RunButInspectReport, InputAndOutputButReport,
    InputAndOutputButInspectVerifyReplayBenchDoctor, InputAndOutput, InputAndOutputTrainScoreGenerateGrpo,
    InputAndOutputButInspectReplayBenchReportDoctor, MinibatchesPlanTrainVerifyReplayGrpo, Minibatches, Schedule,
    ScheduleButInspectReport, ScheduleButGenerateReportDoctor, Objective, ObjectiveButInspectScoreGenerateReportDoctor,
    ObjectiveGrpo, TrlsFormulas, TrlsFormulasButInspectScoreGenerateReportDoctor, TrlsFormulasTrainVerifyReplayGrpo,
    CriticPlanTrainScoreVerifyGrpo, Critic, OptimizerButInspectScoreGenerateReportDoctor, Optimizer, Adapters,
    AdaptersButInspectReport, ParallelDegrees, ParallelDegreesButInspectGenerateReportDoctor,
    ParallelDegreesButInspectPlanReportDoctor, Sampling, SamplingPlanBenchGenerateGrpo, SamplingButInspectPlanReport,
    SamplingButInspectReportDoctor, SamplingPlanGenerateGrpo, ClosedLoop, ClosedLoopTrainGrpo, ClosedLoopInspectGrpo, EveryVerb,
    NamesOfTrl, NamesOfTrlButInspectScoreReportDoctor, NamesOfTrlButInspectReport, NamesOfTrlTrainVerifyReplayBenchGrpo): ...

class ReportOptions(Run, InputAndOutputButInspectVerifyReplayBenchDoctor, EveryVerb, EveryVerbButTrainScoreGenerateGrpo): ...

class DoctorOptions(Run, RunButInspectReport, InputAndOutputButReport, ScheduleButInspectReport, AdaptersButInspectReport,
    SamplingButInspectPlanReport, ClosedLoopDoctor, EveryVerb, EveryVerbButTrainScoreGenerateGrpo, NamesOfTrlButInspectReport):
    ...

def inspect(*rollouts: _Path | _Records, **options: Unpack[InspectOptions]) -> dict[str, Any]: ...

def plan(**options: Unpack[PlanOptions]) -> dict[str, Any]: ...

def train(**options: Unpack[TrainOptions]) -> dict[str, Any]: ...

def score(**options: Unpack[ScoreOptions]) -> dict[str, Any]: ...

def verify(**options: Unpack[VerifyOptions]) -> dict[str, Any]: ...

def replay(*trace: _Path, **options: Unpack[ReplayOptions]) -> dict[str, Any]: ...

def bench(**options: Unpack[BenchOptions]) -> dict[str, Any]: ...

def generate(**options: Unpack[GenerateOptions]) -> dict[str, Any]: ...

def grpo(**options: Unpack[GrpoOptions]) -> dict[str, Any]: ...

def report(*run_folder: _Path, **options: Unpack[ReportOptions]) -> dict[str, Any]: ...

def doctor(*dump: _Path, **options: Unpack[DoctorOptions]) -> dict[str, Any]: ...
