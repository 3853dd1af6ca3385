// What c10d's header names of Gloo's devices, without bodies: a use beyond that is a link error.
#pragma once

namespace gloo::transport {

class Device;
class UnboundBuffer;

}  // namespace gloo::transport
