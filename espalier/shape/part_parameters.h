// The parameters of a part of a layer, a mixer or an MLP, as the part lists them. Files, flat buffers, views, FLOPs,
// additions, shards and --train are loops over these lists.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace espalier {

// The ranks over which the side of a parameter is sharded.
enum class Cut : std::uint8_t {
  none,     // every rank has the whole side
  tp,       // each rank of tp has a part
  experts,  // the inner width of an expert: over tp, unless ranks of ep have whole experts
};

struct Side {
  std::int64_t size = 0;
  Cut cut = Cut::none;
  std::array<std::int32_t, 5> sections = {};  // sizes, end to end: a rank has a part of each; 0: no such section
  std::int64_t most_parts = 0;  // more ranks than this share parts, as ranks with equal key/value heads; 0: no limit
};

// y = x W^T + b with W [out, in]. Its parameters are <prefix><name>.weight and <prefix><name>.bias.
struct ProjectionShape {
  const char* name = "";
  Side out, in;
  bool bias = false;
  std::int64_t rank = 0;  // of its addition (Additions), whose rows are pair_names; 0: none
  bool of_heads = false;  // every head reads all of its outputs
  // The module of transformers that is this projection with its neighbours: they have one A, which stands before the
  // first of them, and a B each. "": an A of its own.
  const char* joint = "";
  bool shares_a = false;  // not the first of them

  std::int64_t low_rank() const { return rank * (out.size + (shares_a ? 0 : in.size)); }  // elements of A and B
  std::int64_t weights() const { return out.size * in.size; }
  std::int64_t parameters() const { return weights() + (bias ? out.size : 0); }
};

struct NormShape {
  const char* name = "";
  std::int64_t width = 0;  // 0: there is none
  bool bias = false;

  std::int64_t parameters() const { return bias ? 2 * width : width; }
};

// A parameter of another form.
struct TensorShape {
  const char* name = "";  // the whole name behind the layer's prefix
  std::vector<Side> sides = {};

  std::int64_t parameters() const {
    std::int64_t count = 1;
    for (const Side& side : sides) count *= side.size;
    return count;
  }
};

// The rows over which a product runs: all of the layer's; those that continue past the mixer (all, or in a narrow last
// layer those with an output); or, for each expert, those that chose it.
enum class ProductRows : std::uint8_t { all, continuing, chosen };

// Matrices that one product reads, their outputs end to end. Without parts, the layer has no such product.
struct ProductShape {
  ProductRows rows = ProductRows::all;
  std::vector<ProjectionShape> parts = {};
  std::int64_t split_at = 0;  // it runs as two products: these first outputs, and those behind them; 0: as one

  bool exists() const { return !parts.empty(); }
  std::int64_t weights() const { return sum(&ProjectionShape::weights); }
  std::int64_t parameters() const { return sum(&ProjectionShape::parameters); }
  std::int64_t low_rank() const { return sum(&ProjectionShape::low_rank); }
  std::int64_t outputs() const {
    std::int64_t total = 0;
    for (const ProjectionShape& part : parts) total += part.out.size;
    return total;
  }
  // Elements of additions that a row meets: an A as often as it is read, also where another product has it.
  std::int64_t low_rank_work() const {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool reads_a = i == 0 || !parts[i].shares_a;
      total += parts[i].rank * (parts[i].out.size + (reads_a ? (split_at > 0 ? 2 : 1) * parts[i].in.size : 0));
    }
    return total;
  }

 private:
  std::int64_t sum(std::int64_t (ProjectionShape::*of)() const) const {
    std::int64_t total = 0;
    for (const ProjectionShape& part : parts) total += (part.*of)();
    return total;
  }
};

// Tensors that are read as one, end to end on their first dimension. Without parts, the layer has no such tensor.
struct TensorRow {
  std::vector<TensorShape> parts = {};
  bool of_heads = false;  // read by heads: a rank with some of the heads has a part of its gradient
  bool trains = true;     // false: held, and never changes

  bool exists() const { return !parts.empty(); }
};

// Products and tensors are numbered in the order in which they are added. A part of a kind always adds the same ones,
// so that its own code finds each by its number; those that a layer lacks are added without parts.
class PartParameters {
 public:
  // Products whose matrices are neighbours in flat buffers: all weights, then all biases, then their additions.
  // `fused`: the tensor of files that holds them all; `joint`: the module of transformers that is all of them; "": each
  // its own.
  void add(std::vector<ProductShape> neighbours, const char* fused = "", const char* joint = "");
  void add(TensorRow tensor);

  const std::vector<ProductShape>& products() const { return products_; }
  std::vector<ProductShape>& products() { return products_; }
  const std::vector<TensorRow>& tensors() const { return tensors_; }

  // An entry of the order in flat buffers: products [first, first + count), or the tensor `first`.
  struct Entry {
    bool products;
    std::size_t first, count;
    const char* fused;
  };
  const std::vector<Entry>& entries() const { return entries_; }

  // The number of a product's part among all parts of the list: its bit where a set of projections is stored in bits.
  std::size_t number(std::size_t product, std::size_t part) const {
    for (std::size_t i = 0; i < product; ++i) part += products_[i].parts.size();
    return part;
  }

  // Sums over the rows that the products run over, of one expert where they are `chosen`.
  template <class Of>
  std::int64_t sum(ProductRows rows, Of of) const {
    std::int64_t total = 0;
    for (const ProductShape& product : products_)
      if (product.rows == rows) total += of(product);
    return total;
  }
  std::int64_t tensor_parameters() const;

 private:
  std::vector<ProductShape> products_;
  std::vector<TensorRow> tensors_;
  std::vector<Entry> entries_;
};

}  // namespace espalier
