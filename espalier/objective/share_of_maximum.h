// The gradient of a maximum at its kink, as in torch.autograd: equal numbers get half of it each.
#pragma once

namespace espalier {

// The fraction of the gradient that maximum(a, b) passes to a, and minimum(a, b) to b.
inline double share_of_maximum(double a, double b) { return a > b ? 1.0 : a == b ? 0.5 : 0.0; }

}  // namespace espalier
