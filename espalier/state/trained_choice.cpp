#include "espalier/state/trained_choice.h"

#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/checkpoint/adapter.h"
#include "espalier/config/model_config.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// An expression in which every character stands for itself.
std::string literal(const std::string& name) {
  std::string out;
  for (const char c : name) out += c == '.' ? std::string("[.]") : std::string(1, c);
  return out;
}

// The adapter in `directory`, which stands beside a model of this shape. Its values of a value head need no word: the
// head trains whatever the words are.
TrainedChoice stored_choice(const Options& options, const std::string& words, const std::string& directory,
                            const ModelShape& base, bool trains) {
  AdditionChoice adapter;
  adapter.seed = static_cast<std::uint64_t>(options.seed);
  const Adapter stored(directory, base);
  if (trains && stored.dropout() > 0)
    throw UnsupportedError({(fs::path(directory) / "adapter_config.json").string() + ": lora_dropout",
                            "0, because a shared row must be the same in every rollout", text_of(stored.dropout()),
                            "set it to 0 to train without dropout"});
  const Adapter::Size size = stored.common_size();
  adapter.rank = size.rank, adapter.alpha = size.alpha, adapter.root_of_rank = stored.root_of_rank();
  adapter.modules = std::make_shared<const std::set<std::string>>(stored.modules());
  adapter.directory = directory;
  adapter.value_head = base.value_head && stored.has(kValueWeight);
  std::string all = words;
  if (words == "all")
    for (const std::string& name : stored.whole())
      if (!base.value_head || (name != kValueWeight && name != kValueBias))
        all += (all == "all" ? (all.clear(), "") : ",") + literal(name);
  return {all, std::move(adapter)};
}

// Processors read matrices of bfloat16 beside rows of float32; sharded units have one dtype.
bool keeps_narrow(const Options& options) {
  return options.dtype != DType::float64 && options.device == DeviceType::cpu && options.shard != Sharding::full;
}

// The words of --weights stand in the order of the kinds.
quantised::Kind held_kind(const Options& options) {
  const auto kind = static_cast<quantised::Kind>(HeldWeights{options.weights});
  if (kind == quantised::Kind::none) return kind;
  const quantised::Rows& rows = quantised::rows_of(kind);
  const std::string option = text_of("--weights ", rows.word);
  if (options.device != DeviceType::cpu)
    throw UnsupportedError({option, "--device cpu", text_of("--device ", options.device),
                            "leave --weights out: the matrices are then held in the model's dtype"});
  if (options.shard == Sharding::full)
    throw UnsupportedError({option, "--shard none or optimizer", "--shard full, whose units have one dtype",
                            text_of("leave --shard full out: matrices in ", rows.name, " take a fraction of float32")});
  return kind;
}

// How what does not train is held.
void set_held(const Options& options, TrainedChoice& choice) {
  choice.narrow = keeps_narrow(options);
  choice.held = held_kind(options);
}

TrainedChoice choice_of(const Options& options, const std::string& words, const std::string& directory, bool trains,
                        bool scores) {
  TrainedChoice choice(words);
  if (directory.empty()) {
    AdditionChoice& adapter = choice.added;
    adapter.seed = static_cast<std::uint64_t>(options.seed);
    adapter.rank = options.lora_rank, adapter.alpha = options.lora_alpha, adapter.root_of_rank = options.use_rslora;
    adapter.target = options.lora_target;
  } else {
    const std::string model = model_source(options);
    choice = stored_choice(options, words, directory, scores ? read_reward_shape(model).shape : read_model_shape(model),
                           trains);
    if (options.lora_rank > 0 && options.lora_rank != choice.added.rank)
      throw OptionError({"--lora-rank", text_of(choice.added.rank, ", that of ", directory), text_of(options.lora_rank),
                         "leave --lora-rank out: the adapter has its own"});
  }
  choice.scores = scores;
  set_held(options, choice);
  choice.frozen = !trains && choice.held != quantised::Kind::none;
  return choice;
}

// The model directory that an adapter's config names.
std::string base_of(const std::string& adapter, const char* remedy) {
  const std::string base = base_named_in(adapter);
  std::error_code ignored;
  if (base.empty() || !fs::is_directory(base, ignored))
    throw InputError({(fs::path(adapter) / "adapter_config.json").string() + ": base_model_name_or_path",
                      "the directory of the adapter's model", base.empty() ? "none" : "'" + printable(base) + "'",
                      remedy});
  return base;
}

constexpr const char* kCriticRemedy = "write the model's directory there";

std::string critic_of(const std::string& run) { return (fs::path(run) / "critic").string(); }

// "q_proj,v_proj": the kinds of modules that an adapter stands beside, whatever their layers.
std::string kinds_of(const std::set<std::string>& modules) {
  std::set<std::string> kinds;
  for (const std::string& module : modules) {
    const std::size_t last = module.rfind('.');
    const bool experts = module.find(".experts.") != module.npos;
    kinds.insert((experts ? "experts." : "") + (last == module.npos ? module : module.substr(last + 1)));
  }
  std::string out;
  for (const std::string& kind : kinds) out += (out.empty() ? "" : ",") + kind;
  return out;
}

constexpr std::uint64_t kCriticStream = std::uint64_t{1} << 41;  // of --seed: beyond the actor's adapter

// A fresh adapter like the actor's.
AdditionChoice like_actor(AdditionChoice adapter) {
  if (adapter.modules) adapter.target = kinds_of(*adapter.modules);
  adapter.modules = nullptr, adapter.directory.clear(), adapter.value_head = false;
  adapter.seed = Random(adapter.seed).fork(kCriticStream).key();
  return adapter;
}

}  // namespace

std::string model_source(const Options& options) {
  if (!options.model.empty() || options.resume.empty() || !is_adapter(options.resume))
    return options.model.empty() ? options.resume : options.model;
  return base_of(options.resume, "name it with --model");
}

TrainedChoice trained_choice(const Options& options) {
  const bool resumes = options.adapter.empty() && !options.resume.empty() && is_adapter(options.resume);
  return choice_of(options, options.train, resumes ? options.resume : options.adapter, true,
                   options.objective == ObjectiveKind::reward);
}

bool asks_for_additions(const Options& options) { return options.lora_rank > 0 || !options.adapter.empty(); }

void require_no_additions(const Options& options, const std::string& when, const std::string& remedy) {
  if (options.lora_rank > 0)
    throw OptionError({"--lora-rank", "0 " + when, text_of(options.lora_rank), remedy + ", or leave --lora-rank out"});
  if (!options.adapter.empty())
    throw OptionError({"--adapter", "none " + when, options.adapter, remedy + ", or leave --adapter out"});
}

bool scores_answers(const Options& options) {
  return is_reward_model(options.model) || (!options.adapter.empty() && is_reward_adapter(options.adapter));
}

TrainedChoice scored_choice(const Options& options, bool takes_reward_models) {
  const bool scores = takes_reward_models && scores_answers(options);
  Options scored = options;  // a reward model may be scored with alone: its head is stored
  scored.lora_rank = 0;
  return choice_of(scored, "all", options.adapter, false, scores);
}

std::string critic_directory(const Options& options) {
  if (!options.critic.empty() || options.resume.empty()) return options.critic;
  const std::string former = critic_of(options.resume);
  std::error_code ignored;
  return fs::exists(former, ignored) ? former : "";
}

std::optional<CriticChoice> trained_critic(const Options& options) {
  std::string source = critic_directory(options);
  if (source.empty()) return std::nullopt;
  const std::string former = options.resume.empty() ? "" : critic_of(options.resume);
  std::string adapter;
  if (is_adapter(source))
    adapter = std::exchange(source, base_of(source, kCriticRemedy));
  else if (!former.empty() && is_adapter(former))
    adapter = former;
  CriticChoice critic{source, {options.train, like_actor(trained_choice(options).added)}};
  if (!adapter.empty())
    critic.train = stored_choice(options, options.train, adapter, read_critic_shape(source).shape, true);
  set_held(options, critic.train);
  return critic;
}

std::optional<CriticChoice> scored_critic(const Options& options) {
  if (options.critic.empty()) return std::nullopt;
  CriticChoice critic{options.critic, {}};
  if (is_adapter(options.critic)) {
    critic.source = base_of(options.critic, kCriticRemedy);
    critic.train = stored_choice(options, "all", options.critic, read_critic_shape(critic.source).shape, false);
  }
  set_held(options, critic.train);
  critic.train.frozen = critic.train.held != quantised::Kind::none;
  return critic;
}

ModelShape read_critic_shape(const CriticChoice& critic) {
  return read_trained_critic_shape(critic.source, critic.train);
}

}  // namespace espalier
