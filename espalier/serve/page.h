// The page of a server: one static document that asks the server for its numbers.
#pragma once

#include <string>

namespace espalier::serve {

const std::string& page_text();

}  // namespace espalier::serve
