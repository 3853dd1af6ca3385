// Additions: rows of the table of parameters that a run trains beside held matrices, and that are absent from the
// model's files. The one kind is the LoRA adapter, W + s B A (Additions).
//
// A projection is adapted if it has an addition: LayerShape::adapted says so by its bit, ProjectionShape::rank by its
// size. This file chooses the projections (--lora-target, or the modules of a stored adapter) and names the rows;
// all code that loads, saves, counts, draws or trains parameters reads the rows (ParameterShape::added, ::start).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "espalier/base/quantised_rows.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {

// The additions of a run.
struct AdditionChoice {
  std::int64_t rank = 0;  // 0: none
  double alpha = 16;
  bool root_of_rank = false;
  std::string target = "all-linear";                     // --lora-target
  std::shared_ptr<const std::set<std::string>> modules;  // not null: these are adapted, whatever `target` says
  std::filesystem::path directory;                       // their values; empty: start values, drawn from `seed`
  std::uint64_t seed = 0;
  bool draws_all = false;   // rows that start as 0 are drawn, too: a check that a B of 0 would hide from
  bool value_head = false;  // `directory` has the critic's
  bool any_rank = false;    // also one above the smaller side of a target

  bool exist() const { return rank > 0; }
  bool operator==(const AdditionChoice&) const = default;
};

// Sets the additions of the shape: `added`, and the bits of its layers. Errors: OptionError for a target that matches
// nothing or names the embedding, and for a rank above the smaller side of a target, unless any_rank is set;
// UnsupportedError for a model that takes none (takes_additions, or beside a vision tower) and for an addition of a
// module that cannot have one.
void add_additions(ModelShape& shape, const AdditionChoice& choice);

// Refuses trained parameters of the model that have an addition. `trains`: in the order of `parameters`, all of them;
// `expected`: what --train takes.
void check_beside_additions(const ModelShape& shape, const std::vector<ParameterShape>& parameters,
                            const std::vector<bool>& trains, const char* expected);

// Refuses matrices in few bits in a run without additions, in which nothing could train.
[[noreturn]] void refuse_held_alone(quantised::Kind kind);

// Refuses additions that no kernel of the device computes: a GPU's have none of experts.
void require_device_adds(const ModelShape& shape, bool in_host_memory);
// Refuses additions that --shard full excludes: that of a tied head.
void require_shards_add(const ModelShape& shape);

// "norms lora(r=8, alpha=16): q_proj, v_proj": what a checkpoint is compared by.
std::string words_with_additions(const ModelShape& shape, const std::string& words);

// True if the model can have additions: its parameters must be modules of transformers, or parts of joined ones. Models
// whose blocks may be halves (Nemotron-H), or whose files stack the matrices of modules (Granite 4), take none.
bool takes_additions(const ModelShape& shape);

// Sets which projections of each layer are adapted, and what follows from it.
void set_adapted(ModelShape& shape, const std::vector<AdaptedLayer>& of_layer);

// The model with an addition of every module that can have one.
ModelShape with_every_addition(ModelShape shape, std::int64_t rank);

// Modules that can be adapted, as transformers calls them: "model.layers.0.self_attn.q_proj", "lm_head";
// "model.layers.0.mlp.experts.gate_up_proj", the parameter of all experts of a layer.
std::vector<std::string> adaptable_modules(const ModelShape& shape);

// True if the experts of any layer are adapted.
bool adapts_experts(const ModelShape& shape);

// The names of A and B of a projection, which is <prefix><name>; joint projections have one A.
struct PairNames {
  std::string a, b;
};
PairNames pair_names(const std::string& prefix, const ProjectionShape& projection);
// The tensors of a module in peft's files, without their prefix.
PairNames pair_of_module(const std::string& module);

}  // namespace espalier
