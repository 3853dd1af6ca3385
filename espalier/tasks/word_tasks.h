// The built-in tasks of `grpo`, whose tokens are words.
#pragma once

#include "espalier/loop/built_in_tasks.h"

namespace espalier {

const BuiltInTasks& word_tasks();

}  // namespace espalier
