// Held matrices in few bits: each row is a run of bytes that says everything about its numbers, so that matrices are
// cut and joined at rows like any other tensor.
//
// A form of rows has a file of its own (nf4.h, fp8.h) and a line in quantised_rows.cpp; nobody else asks which form it
// is. A row begins with RowHeader. Rows of zero bytes, as padding is, stand for zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace espalier::quantised {

enum class Kind : std::uint16_t { none, nf4, fp8 };

// How the rows of a model's matrices are made.
struct Form {
  Kind kind = Kind::none;
  bool nested = false;                             // NF4: the scales of blocks are quantised, too
  std::int32_t block_rows = 0, block_columns = 0;  // FP8: numbers with one scale

  bool operator==(const Form&) const = default;
};

struct RowHeader {
  std::int32_t columns;
  Kind kind;
  std::uint16_t place;  // of the row's first number, or block, in what a scale belongs to
};
static_assert(sizeof(RowHeader) == 8);

RowHeader header_of(const std::byte* row);
// Overwrites `out` with numbers [first, first + count) of the row; `first` is even.
void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out);

// A whole matrix.
class Matrix {
 public:
  virtual ~Matrix() = default;

  virtual Form form() const = 0;
  // Overwrites `out`, row_bytes(form, columns) bytes, with columns [begin, end) of one row, and with zeros for the rest
  // of `columns`.
  virtual void write_row(std::int64_t row, std::int64_t begin, std::int64_t end, std::int64_t columns,
                         std::byte* out) const = 0;
  // The codes of the matrix, which may lie in a mapped file.
  virtual std::span<const std::byte> stored_codes() const = 0;
  // The matrix of rows [first, first + count), which reads what this one reads; null if the form has no such matrices.
  virtual std::shared_ptr<const Matrix> part(std::int64_t first, std::int64_t count) const = 0;
};

// A form, by what is asked about it.
struct Rows {
  const char *word, *name;      // of --weights; in messages
  std::int64_t whole_columns;   // inputs of a matrix, and of a part of it, are a multiple
  const char* left_out_member;  // of config.json: the modules that files store in another form
  bool quantises;               // true if weights that files store otherwise can be held so, as `usual`
  Form usual;
  std::int64_t (*bytes)(const Form& form, std::int64_t columns);  // of a row
  void (*values)(const std::byte* row, std::int64_t first, std::int64_t count, float* out);
  // Quantises numbers of bfloat16, by rows in ascending order: row(n, out) overwrites out with the numbers of row n.
  std::shared_ptr<const Matrix> (*quantise)(const Form& form, std::int64_t rows, std::int64_t columns,
                                            const std::function<void(std::int64_t n, float* out)>& row);
};
const Rows& rows_of(Kind kind);  // `kind` is not none

inline std::int64_t row_bytes(const Form& form, std::int64_t columns) {
  return rows_of(form.kind).bytes(form, columns);
}

}  // namespace espalier::quantised
