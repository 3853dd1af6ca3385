// SampleRequest as JSON, and SampleResponse as protobuf.
#pragma once

#include <string>

#include "espalier/serve/engine.h"
#include "espalier/serve/fields.h"
#include "espalier/serve/sample_calls.h"

namespace espalier::serve {

// Errors: InputError, naming the member; UnsupportedError for images and for stability records.
SampleCall sample_call(const Fields& request, const BaseModel& model);

std::string write_sample(const SampleAnswer& answer, const SampleCall& call);

}  // namespace espalier::serve
