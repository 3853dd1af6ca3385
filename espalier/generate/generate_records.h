// `generate`: from a model directory and a file of prompts to records of rollouts.
#pragma once

#include <optional>

#include "espalier/generate/sampler.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

// The settings of --n, --temperature, --top-k, --top-p, --max-response-length, --max-num-seqs, --token-budget, --turns
// and --seed. Stop ids and the limit of keys and values are not set. Errors: OptionError for an --n that is not one
// whole number of at least 1.
SamplingSettings sampling_settings(const Options& options);

// The tokens of --stop-ids. Without the option: eos_token_id (a number or a list) of generation_config.json in the
// model's directory, or else of config.json, and the eos token of `tokenizer`, which may be null. Empty: no token ends
// a response. Errors: OptionError for ids beyond the vocabulary, InputError for an eos_token_id of another kind.
std::vector<std::int32_t> stop_ids(const Options& options, std::int64_t vocabulary, const Tokenizer* tokenizer);

// Errors: OptionError for --turns without --env and --env beside --reward.
void check_environment(const Options& options);

// Splits --memory-budget, or else the free memory, into activations and keys and values: sets `settings.token_budget`,
// `settings.max_num_seqs` and `settings.kv_limit_bytes` if they are not set. For one rank; all ranks of the mesh use
// the settings of the rank with the least memory.
void plan_memory(const LocalShape& shape, const Options& options, SamplingSettings& settings,
                 const Mesh& mesh = mesh_of_one());

struct GeneratedRecords {
  GenerateReport report;
  std::optional<double> reward;  // mean over the responses, with --reward or --env
};

// Loads --model, reads --prompts, writes the responses to --out in prompt order: with their text where the model has a
// tokenizer, and with rewards where --reward or --env gives them. Errors: from the parts; --out is then unchanged,
// except after an InputError of the user's Python: the responses are in --out, without the rewards of --reward, and
// under --env with unfinished trajectories cut. Every rank of the mesh generates its part; rank 0 rewards and writes.
GeneratedRecords generate_records(const Options& options, Progress& progress, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
