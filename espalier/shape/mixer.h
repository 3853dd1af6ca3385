// A mixer: the operation of a layer in which rows learn of other rows. It stands between the norm before it and the sum
// with the stream behind it.
//
// Each kind is a folder of mixers/. Its class, derived from Mixer, says there what the engine asks of every kind:
// parameters, limits, what a layer leaves for rows below it, operations and bytes. Nothing above the folder asks which
// kind a mixer is. A mixer is immutable and holds no tensors; model/mixer_layer.h runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/json_fwd.h"
#include "espalier/options/attention_kernels.h"
#include "espalier/shape/part_parameters.h"
#include "espalier/shape/rope.h"

namespace espalier {

struct BlockRows;
struct BlockShape;
struct Degrees;
struct DeviceTraits;
struct ProductBits;

enum class MixerKind : std::uint8_t {
#define ESPALIER_MIXER(name) name,
#include "espalier/mixers/kinds.def"
#undef ESPALIER_MIXER
};
// All of them, in the order of the table.
inline constexpr std::array kMixerKinds{
#define ESPALIER_MIXER(name) MixerKind::name,
#include "espalier/mixers/kinds.def"
#undef ESPALIER_MIXER
};
std::string_view name_of(MixerKind kind);

// Numbers of one kind that a layer leaves in the path for each row.
struct PathKind {
  const char *name, *gradient_name;  // "keys", "gradients of keys"
  std::int64_t width;
  std::int64_t heads = 1;  // that the width is divided into
};

// Floating-point operations of a layer's mixer besides its products (mathematics, section 9).
struct MixerFlops {
  double pair = 0, pair_backward = 1;  // of a visible pair of rows, forward; the backward's over the forward's
  double row = 0, row_backward = 1;    // of a row, at any depth
};

// Numbers of activations that a row moves in a forward besides products, and calls of kernels in one forward.
struct MixerTraffic {
  double numbers = 0;
  int calls = 0;
};

// The numbers that determine a mixer's scratch outside the arena.
struct ScratchRows {
  const DeviceTraits& device;
  DType dtype;
  std::int64_t rows = 0, path_rows = 0;
  std::int64_t threads = 1;
  bool gradients = true;
};
// Bytes on a GPU: those that a layer gives back when it ends, and those that ATen's allocator keeps for the next layer.
struct GpuScratch {
  std::int64_t given_back = 0, kept = 0;
};

class Mixer {
 public:
  explicit Mixer(MixerKind kind) : kind_(kind) {}
  virtual ~Mixer() = default;
  Mixer(const Mixer&) = default;
  Mixer& operator=(const Mixer&) = delete;

  MixerKind kind() const { return kind_; }

  // Shape.

  // For rows of width `hidden`. The last product's result is added to the stream.
  virtual PartParameters parameters(std::int64_t hidden) const = 0;
  virtual std::size_t output_product() const = 0;  // its number
  virtual std::int64_t mixed_width() const = 0;    // of what it reads
  // The part that one of `ranks` ranks of tp runs.
  virtual std::shared_ptr<const Mixer> part(std::int64_t ranks) const = 0;
  // Errors: OptionError if ranks cannot split the mixer this way.
  virtual void require(const Degrees& degrees) const = 0;
  // Why the GPU's kernels do not run it, with numbers of `number_bytes` in sums; empty: they do.
  struct Refusal {
    std::string expected, found;
  };
  virtual Refusal refused_on_gpu(std::int64_t number_bytes) const = 0;
  // The kind and every size that its weights' meaning depends on, in words of a fingerprint.
  virtual std::string fingerprint() const = 0;
  // Members of a report about the model: "heads" and others.
  virtual void report(Json& /*json*/) const {}
  // The tables of rotations that it reads, in the order in which it finds them.
  virtual std::vector<RotaryShape> rotations() const { return {}; }

  // Rows and states that the layer leaves for rows below it:

  // Numbers of each row, in the path. `latents`: in the narrower form, for mixers that narrow it.
  virtual std::vector<PathKind> path_kinds(bool /*latents*/) const { return {}; }
  virtual bool narrows_path() const { return false; }
  // The number, in the whole model, of the layer whose rows it reads: the mixer leaves none of its own. -1: there is
  // none.
  virtual std::int64_t source() const { return -1; }
  // Columns of the product that expands latents to keys and values, 0 without latents; and whether any of these
  // products is adapted.
  virtual std::int64_t expanded_width() const { return 0; }
  virtual bool adapts_expansion(const ProductBits& /*adapted*/) const { return false; }
  // The most rows that a row sees, itself included; 0: all above it.
  virtual std::int64_t window() const { return 0; }
  // Numbers of the state that a row leaves for the next one; 0: none. States are kept where runs of rows fork.
  virtual std::int64_t state() const { return 0; }
  // True if a GPU can run its rows in chunks, in bfloat16 (ops/cuda/delta_chunks.h).
  virtual bool fits_chunks() const { return false; }

  // Heads that attend, which a library may compute on a GPU; nothing for other mixers.
  virtual std::optional<AttentionHeads> attended() const { return std::nullopt; }

  // Work.

  virtual MixerFlops flops() const = 0;
  virtual MixerTraffic traffic() const = 0;
  // The widest row that a product or a kernel reads or writes.
  virtual std::int64_t widest_row() const = 0;
  // Bytes outside the arena on a CPU, whose threads keep them for other layers of the kind; and on a GPU.
  virtual std::int64_t cpu_scratch(const ScratchRows& rows) const = 0;
  virtual GpuScratch gpu_scratch(const ScratchRows& rows) const = 0;

  // Bytes in the arena. The block takes buffers of its own while the mixer's are held: `mlp` and `output` in a
  // backward, before and while the gradient comes through the last product; `output` in a forward around that product.
  struct BlockBytes {
    std::int64_t mlp = 0, output = 0;
  };
  virtual std::int64_t saved_bytes(const BlockShape& block, const BlockRows& rows) const = 0;
  virtual std::int64_t forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const = 0;
  virtual std::int64_t backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const = 0;

 private:
  MixerKind kind_;
};

}  // namespace espalier
