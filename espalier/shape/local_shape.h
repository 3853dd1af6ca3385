// One rank's part of a model: its heads, inner columns, vocabulary rows, layers and experts.
//
// It determines the sizes of a rank's blocks (own()), its parameter table and views, its part of the K/V path, its
// FLOPs and bytes. With one rank it is the whole shape. A side of a parameter (Cut) that is sharded over tp is cut into
// parts of ceil(size / parts); local rows (columns) after `end` are padding. Padding is 0 in weights, gradients and
// moments, stays 0, and is never in a file. If there are fewer key/value heads than ranks, several ranks hold a head,
// and each of them computes a part of its gradient. Experts are sharded over tp like the dense MLP if ep is 1;
// otherwise each rank holds E / ep whole experts.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/parallel/degrees.h"
#include "espalier/shape/model_shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {

// A rank's part of one parameter.
struct Shard {
  int dim = -1;                     // the sharded dimension; -1: none, this rank has all of it
  std::int64_t begin = 0, end = 0;  // this rank's range of that dimension; of the first (only) one if dim is -1
  std::int64_t local = 0;           // its extent on this rank: end - begin, then padding
  std::int64_t whole = 0;           // its extent in files
  std::array<std::int32_t, 5> sections = {};  // sections in files: a rank has a part of each; 0: no such section
  std::int64_t copies = 1;                    // neighbouring ranks of tp that hold the same part, this one included
  bool partial_gradient = false;              // each copy has a part of the gradient: they must be summed
  bool of_expert = false;  // its other copies are on Axis::expert_replicas where ep > 1, else on Axis::replicas
  bool first = true;       // true on one of all ranks that hold the part
  bool counted = true;     // a global norm counts this part here
  bool padded() const { return local > end - begin; }

  // This rank's ranges of the sharded dimension, in order.
  struct Range {
    std::int64_t begin, end;
  };
  std::vector<Range> ranges() const;
};

class LocalShape {
 public:
  // One rank has everything.
  LocalShape(const ModelShape& whole) : LocalShape(whole, Degrees{}, Place{}) {}  // NOLINT(google-explicit-constructor)
  // Errors: OptionError if the model cannot be split this way. tp must divide the query heads and the key heads of
  // recurrent layers, divide or be a multiple of the key/value heads, be 1 with QK-norms over all heads, and cut NF4
  // between blocks; ep must divide the experts and be a multiple of tp, or 1; cp must be 1 with recurrent layers; an
  // addition to a tied head excludes --shard full; and no rank may be empty.
  LocalShape(const ModelShape& whole, const Degrees& degrees, const Place& place);

  const ModelShape& whole() const { return whole_; }
  const Degrees& degrees() const { return degrees_; }
  const Place& place() const { return place_; }
  // Stages of pp hand streams on, and their gradients back. The first looks tokens up, the last has the outputs.
  bool is_first_stage() const { return place_.pp == 0; }
  bool is_last_stage() const { return place_.pp + 1 == degrees_.pp; }
  // The sizes of this rank's blocks: its heads, inner widths, padded vocabulary rows and layers. `experts` stays the
  // number that routers choose from, and token ids stay the whole model's.
  const ModelShape& own() const { return own_; }

  // The shape of the rank at this place of the last stage of pp, which has the most layers, but with as many waves in
  // flight as the first stage. All stages plan with it.
  LocalShape last_stage() const;
  // The most waves of this stage of pp that await their backward at a time (program/program.h).
  std::int64_t waves_in_flight() const { return waves_in_flight_; }

  struct Range {
    std::int64_t begin = 0, end = 0;

    std::int64_t size() const { return end - begin; }
    bool has(std::int64_t index) const { return index >= begin && index < end; }
    bool operator==(const Range&) const = default;
  };
  Range layers() const { return layers_; }
  std::int64_t expert_layers_before() const;  // layers of experts before this rank's first layer
  Range experts() const { return experts_; }
  Range vocabulary() const;        // rows of embedding and head, without padding
  Range input_vocabulary() const;  // rows of the table of LayerInputs

  // Empty if another rank has the parameter.
  std::optional<Shard> shard(const ParameterShape& parameter) const;

  // Elements of this rank's parameters, padding included; bytes with Parameters::quantised.
  std::int64_t parameters(Parameters which = Parameters::all) const;

 private:
  // The number of parts into which tp cuts a side, and this rank's part.
  struct Portion {
    std::int64_t parts = 1, index = 0;
  };
  Portion portion(const Side& side) const;
  void check_quantised_cuts() const;

  ModelShape whole_, own_;
  Degrees degrees_;
  Place place_;
  Range layers_, experts_;
  std::int64_t waves_in_flight_;
};

}  // namespace espalier
