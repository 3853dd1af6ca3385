// A thread takes a range of channels, which share nothing with other channels, and goes through all runs in blocks of
// rows. A row's numbers do not depend on its block: the same row has the same bits in every plan.
#include <algorithm>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/convolution_ranges.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

template <class T>
class ConvolvedChannels {
 public:
  using A = accumulator_t<T>;

  ConvolvedChannels(const ShortConvolutionProblem& problem, std::int64_t first)
      : C_(problem.shape.channels),
        K_(problem.shape.kernel),
        first_(first),
        width_(std::min(kConvolutionChannels, C_ - first)),
        projected_(pointer<T>(problem.projected_TW)),
        line_(size((kConvolutionRows + K_ - 1) * width_)),
        mixed_(size(kConvolutionRows * width_)),
        weight_(size(K_ * width_)),
        bias_(size(width_), A(0)),
        rows_(ESPALIER_FOR_SET(convolution_ranges<A>)()) {
    const T *const weight = pointer<T>(problem.conv_CK), *const bias = pointer<T>(problem.conv_bias_C);
    for (std::int64_t c = 0; c < width_; ++c) {
      for (std::int64_t j = 0; j < K_; ++j)
        weight_[size(j * width_ + c)] = static_cast<A>(weight[(first_ + c) * K_ + j]);
      if (bias != nullptr) bias_[size(c)] = static_cast<A>(bias[first_ + c]);
    }
  }

  void forward(const StateRun& run, T* y) {
    for (std::int64_t first = run.begin; y != nullptr && first < run.end; first += kConvolutionRows) {
      const std::int64_t rows = std::min(kConvolutionRows, run.end - first);
      mix(run, first, rows);
      for (std::int64_t r = 0; r < rows; ++r) {
        const T* const gate = part(first + r, 1);
        T* const to = y + (first + r) * C_ + first_;
        const A* const from = mixed_.data() + r * width_;
        for (std::int64_t c = 0; c < width_; ++c) to[c] = static_cast<T>(static_cast<A>(gate[c]) * from[c]);
      }
    }
    if (!run.end_N.defined()) return;
    // By way of the line, since the state may take the place of the one that the run begins with.
    for (std::int64_t i = 0; i < K_ - 1; ++i) input(run, run.end - (K_ - 1) + i, line_.data() + i * width_);
    for (std::int64_t i = 0; i < K_ - 1; ++i)
      std::copy_n(line_.data() + i * width_, width_, pointer<A>(run.end_N) + i * C_ + first_);
  }

  void add_backward(const StateRun& run, const T* grad_y, const ShortConvolutionGradients& gradients) {
    if (sums_.empty()) {
      sums_.assign(size(K_ * width_), 0), bias_sums_.assign(size(width_), 0);
      grad_mixed_.resize(size((kConvolutionRows + K_ - 1) * width_)),
          grad_input_.resize(size(kConvolutionRows * width_));
    }
    const std::int64_t blocks = (run.end - run.begin + kConvolutionRows - 1) / kConvolutionRows;
    T* const grad_projected = pointer<T>(gradients.projected_TW);
    const A* const grad_end = pointer<A>(run.grad_end_N);
    // The first K - 1 rows of the block behind; behind the run there are none.
    std::fill_n(grad_mixed_.begin(), (K_ - 1) * width_, A(0));
    for (std::int64_t block = blocks; block-- > 0;) {
      const std::int64_t first = run.begin + block * kConvolutionRows,
                         rows = std::min(kConvolutionRows, run.end - first);
      mix(run, first, rows);
      std::copy_backward(grad_mixed_.begin(), grad_mixed_.begin() + (K_ - 1) * width_,
                         grad_mixed_.begin() + (rows + K_ - 1) * width_);
      for (std::int64_t r = 0; r < rows; ++r) {
        const T *const gate = part(first + r, 1), *const grad = grad_y + (first + r) * C_ + first_;
        T* const grad_gate = grad_projected + (first + r) * 3 * C_ + C_ + first_;
        for (std::int64_t c = 0; c < width_; ++c) {
          const A of_y = static_cast<A>(grad[c]), of_mixed = of_y * static_cast<A>(gate[c]);
          grad_gate[c] = static_cast<T>(of_y * mixed_[size(r * width_ + c)]);
          grad_mixed_[size(r * width_ + c)] = of_mixed;
          bias_sums_[size(c)] += static_cast<double>(of_mixed);
        }
      }
      rows_.add_weight_gradient(rows, width_, K_, line_.data(), grad_mixed_.data(), sums_.data());
      rows_.convolve_back(rows, width_, K_, grad_mixed_.data(), weight_.data(), grad_input_.data());
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t row = first + r;
        const T *const b = part(row, 0), *const x = part(row, 2);
        T *const grad_b = grad_projected + row * 3 * C_ + first_, *const grad_x = grad_b + 2 * C_;
        const A* const by_end = grad_end != nullptr && row > run.end - K_ ? grad_end + tail(row - run.end) : nullptr;
        for (std::int64_t c = 0; c < width_; ++c) {
          const A of_input = grad_input_[size(r * width_ + c)] + (by_end != nullptr ? by_end[c] : A(0));
          grad_b[c] = static_cast<T>(of_input * static_cast<A>(x[c]));
          grad_x[c] = static_cast<T>(of_input * static_cast<A>(b[c]));
        }
      }
    }
    if (!run.grad_start_N.defined()) return;
    // The inputs before the run: by its rows, and by what follows where the run is shorter than the convolution.
    A* const grad_start = pointer<A>(run.grad_start_N);
    for (std::int64_t before = 1 - K_; before < 0; ++before)
      for (std::int64_t c = 0; c < width_; ++c) {
        A sum = grad_end != nullptr && run.begin + before > run.end - K_
                    ? grad_end[tail(run.begin + before - run.end) + c]
                    : A(0);
        for (std::int64_t j = -before; j < K_; ++j)
          sum += weight_[size((K_ - 1 - j) * width_ + c)] * grad_mixed_[size((before + j) * width_ + c)];
        grad_start[tail(before) + c] += sum;
      }
  }

  void add_sums(const ShortConvolutionGradients& gradients) const {
    if (sums_.empty()) return;
    A *const of_weight = pointer<A>(gradients.conv_CK), *const of_bias = pointer<A>(gradients.conv_bias_C);
    for (std::int64_t c = 0; c < width_; ++c) {
      for (std::int64_t j = 0; j < K_ && of_weight != nullptr; ++j)
        of_weight[(first_ + c) * K_ + j] += static_cast<A>(sums_[size(j * width_ + c)]);
      if (of_bias != nullptr) of_bias[first_ + c] += static_cast<A>(bias_sums_[size(c)]);
    }
  }

 private:
  // A row's b, c or x in these channels.
  const T* part(std::int64_t row, std::int64_t which) const { return projected_ + (row * 3 + which) * C_ + first_; }
  // Where a state holds the input that stands so far from its end, -1 being the last.
  std::int64_t tail(std::int64_t from_end) const { return (K_ - 1 + from_end) * C_ + first_; }

  // u of a row of the run, or of one of the K - 1 before it.
  void input(const StateRun& run, std::int64_t row, A* to) const {
    if (row >= run.begin) {
      const T *const b = part(row, 0), *const x = part(row, 2);
      for (std::int64_t c = 0; c < width_; ++c) to[c] = static_cast<A>(b[c]) * static_cast<A>(x[c]);
    } else if (run.start_N.defined()) {
      std::copy_n(pointer<A>(run.start_N) + tail(row - run.begin), width_, to);
    } else {
      std::fill_n(to, width_, A(0));
    }
  }

  void mix(const StateRun& run, std::int64_t first, std::int64_t rows) {
    for (std::int64_t i = 0; i < rows + K_ - 1; ++i) input(run, first - (K_ - 1) + i, line_.data() + i * width_);
    rows_.convolve(rows, width_, K_, line_.data(), weight_.data(), bias_.data(), mixed_.data());
  }

  std::int64_t C_, K_, first_, width_;
  const T* projected_;
  std::vector<A> line_, mixed_, weight_, bias_;
  ConvolutionRanges<A> rows_;
  std::vector<A> grad_mixed_, grad_input_;
  std::vector<double> sums_, bias_sums_;
};

void short_convolution(const ShortConvolutionProblem& problem, const at::Tensor& y) {
  dispatch(problem.projected_TW.scalar_type(), [&]<class T>() {
#pragma omp parallel for schedule(static)
    for (std::int64_t first = 0; first < problem.shape.channels; first += kConvolutionChannels) {
      ConvolvedChannels<T> channels(problem, first);
      for (const StateRun& run : problem.runs) channels.forward(run, pointer<T>(y));
    }
  });
}

void add_short_convolution_backward(const ShortConvolutionProblem& problem, const at::Tensor& grad_y,
                                    const ShortConvolutionGradients& gradients) {
  dispatch(grad_y.scalar_type(), [&]<class T>() {
#pragma omp parallel for schedule(static)
    for (std::int64_t first = 0; first < problem.shape.channels; first += kConvolutionChannels) {
      ConvolvedChannels<T> channels(problem, first);
      for (auto run = problem.runs.rbegin(); run != problem.runs.rend(); ++run)
        channels.add_backward(*run, pointer<T>(grad_y), gradients);
      channels.add_sums(gradients);
    }
  });
}

}  // namespace

ShortConvolutionOperations short_convolution_operations() {
  return {short_convolution, add_short_convolution_backward};
}

}  // namespace espalier::cpu
