// Short convolutions on a GPU: tensors to the kernels of short_convolution.h.
#include <vector>

#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/short_convolution.h"
#include "espalier/ops/cuda/state_launches.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

template <class T>
ShortConvolutionRows<T> rows_of(const ShortConvolutionProblem& p) {
  return {p.shape.channels, p.shape.kernel, pointer<T>(p.projected_TW), pointer<T>(p.conv_CK),
          pointer<T>(p.conv_bias_C)};
}

void short_convolution_rows(const ShortConvolutionProblem& problem, const at::Tensor& y_TC) {
  dispatch(problem.projected_TW.scalar_type(), [&]<class T>() {
    for (const std::vector<const StateRun*>& launch : launches_of(problem.runs))
      short_convolution<T>(rows_of<T>(problem), runs_of<accumulator_t<T>>(launch), pointer<T>(y_TC));
  });
}

void add_short_convolution_rows_backward(const ShortConvolutionProblem& problem, const at::Tensor& grad_y_TC,
                                         const ShortConvolutionGradients& gradients) {
  dispatch(grad_y_TC.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const ShortConvolutionSums<A> sums{pointer<A>(gradients.conv_CK), pointer<A>(gradients.conv_bias_C)};
    const std::vector<std::vector<const StateRun*>> launches = launches_of(problem.runs);
    for (auto launch = launches.rbegin(); launch != launches.rend(); ++launch)
      add_short_convolution_backward<T>(rows_of<T>(problem), runs_of<A>(*launch), pointer<T>(grad_y_TC),
                                        pointer<T>(gradients.projected_TW), sums);
  });
}

}  // namespace

ShortConvolutionOperations short_convolution_operations() {
  return {short_convolution_rows, add_short_convolution_rows_backward};
}

}  // namespace espalier::cuda
