// One rank's part of a model: its heads, inner columns, vocabulary rows, layers and experts.
//
// Everything a rank does follows from this: the sizes its blocks compute with (own()), its parameter table and views,
// its part of the K/V path, its FLOPs and bytes. With one rank it is the whole shape. A side of a parameter (Cut) that
// tp ranks divide is cut into parts of ceil(size / parts): where that is more than is left, the local rows (columns)
// behind `end` are padding. Padding is 0 in weights, gradients and moments, stays 0, and is never in a file.
// Key/value heads fewer than ranks are held by several: then each of these ranks computes a part of their gradient.
// Experts are divided by tp like the dense MLP where ep is 1; else ranks hold whole experts, E / ep each.
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
  int dim = -1;                     // the dimension that is divided; -1: none, all of it is here
  std::int64_t begin = 0, end = 0;  // of that dimension, [begin, end) is here; the first (only) one where dim is -1
  std::int64_t local = 0;           // its extent here: end - begin, and padding behind it
  std::int64_t whole = 0;           // its extent in files
  std::array<std::int32_t, 5> sections = {};  // of files, a part of each is here; 0: no such section
  std::int64_t copies = 1;                    // neighbouring ranks of tp that hold the same part, this one included
  bool partial_gradient = false;              // each of these copies has a share of the gradient: they are to be summed
  bool of_expert = false;  // copies elsewhere: Axis::expert_replicas where ep > 1, else Axis::replicas
  bool first = true;       // true on one of all ranks that hold the part
  bool counted = true;     // where a global norm counts what is kept: on that one, on all that divide the part
  bool padded() const { return local > end - begin; }

  // What of the divided dimension is here, in this order.
  struct Range {
    std::int64_t begin, end;
  };
  std::vector<Range> ranges() const;
};

class LocalShape {
 public:
  // One rank has everything.
  LocalShape(const ModelShape& whole) : LocalShape(whole, Degrees{}, Place{}) {}  // NOLINT(google-explicit-constructor)
  // Errors: OptionError where the model cannot be divided so: tp must divide the query heads, and divide or be a
  // multiple of the key/value heads; ep must divide the experts and be a multiple of tp, or 1; and every rank must get
  // something.
  LocalShape(const ModelShape& whole, const Degrees& degrees, const Place& place);

  const ModelShape& whole() const { return whole_; }
  const Degrees& degrees() const { return degrees_; }
  const Place& place() const { return place_; }
  // Stages of pp hand streams on, and their gradients back. The first looks tokens up, the last has the outputs.
  bool is_first_stage() const { return place_.pp == 0; }
  bool is_last_stage() const { return place_.pp + 1 == degrees_.pp; }
  // The sizes of this rank's blocks: its heads, inner widths, padded vocabulary rows and layers. `experts` stays the
  // number that routers choose from, and token ids stay those of the whole.
  const ModelShape& own() const { return own_; }

  // The shape of the rank at this place of the last stage of pp, which has most layers, with as many waves in flight as
  // the first. All stages plan with it.
  LocalShape last_stage() const;
  // Most waves of this stage of pp whose backward has not run (program/program.h).
  std::int64_t waves_in_flight() const { return waves_in_flight_; }

  struct Range {
    std::int64_t begin = 0, end = 0;

    std::int64_t size() const { return end - begin; }
    bool has(std::int64_t index) const { return index >= begin && index < end; }
    bool operator==(const Range&) const = default;
  };
  Range layers() const { return layers_; }
  std::int64_t expert_layers_before() const;  // of other ranks, before the first layer here
  Range experts() const { return experts_; }
  Range vocabulary() const;  // rows of embedding and head, without padding

  // Nothing where another rank has the parameter.
  std::optional<Shard> shard(const ParameterShape& parameter) const;

  // Elements of this rank's parameters, padding included.
  std::int64_t parameters(Parameters which = Parameters::all) const;

 private:
  // Into how many parts tp ranks cut a side, and which of them is here.
  struct Portion {
    std::int64_t parts = 1, index = 0;
  };
  Portion portion(Cut cut) const;

  ModelShape whole_, own_;
  Degrees degrees_;
  Place place_;
  Range layers_, experts_;
  std::int64_t waves_in_flight_;
};

}  // namespace espalier
