// Gloo's devices as far as c10d's header names them, without bodies: a use beyond that is a link error.
#pragma once

namespace gloo::transport {

class Device;
class UnboundBuffer;

}  // namespace gloo::transport
