// `generate`: from a model directory and a file of prompts to records of rollouts.
#pragma once

#include <optional>

#include "espalier/generate/sampler.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/text/tokenizer.h"

namespace espalier {

// The settings of --n, --temperature, --top-k, --top-p, --max-response-length, --max-num-seqs, --token-budget and
// --seed. Stop ids and the limit of keys and values are not set.
SamplingSettings sampling_settings(const Options& options);

// --stop-ids, or eos_token_id (a number or a list) of generation_config.json, or else of config.json, in the model's
// directory, and with it the eos token of the tokenizer, where one is given; none: no token ends a response. Errors:
// OptionError for ids beyond the vocabulary, InputError for an eos_token_id of another kind.
std::vector<std::int32_t> stop_ids(const Options& options, std::int64_t vocabulary, const Tokenizer* tokenizer);

// Errors: OptionError for --turns without --env and --env beside --reward.
void check_environment(const Options& options);

// Splits --memory-budget, or else the free memory, into activations and keys and values: sets `settings.token_budget`
// and `settings.kv_limit_bytes` if they are not set. For one rank; all ranks of the mesh use the settings of the rank
// with the least memory.
void plan_memory(const LocalShape& shape, const Options& options, SamplingSettings& settings,
                 const Mesh& mesh = mesh_of_one());

struct GeneratedRecords {
  GenerateReport report;
  std::optional<double> reward;  // mean over the responses, with --reward or --env
};

// Loads --model, reads --prompts, writes the responses to --out in prompt order: with their text where the model has a
// tokenizer, and with rewards where --reward gives them. Errors: those of the parts; --out is as it was before then,
// except for InputError of the reward function: the responses are in --out, without rewards. Every rank of the mesh
// generates its part; rank 0 rewards and writes.
GeneratedRecords generate_records(const Options& options, Progress& progress, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
