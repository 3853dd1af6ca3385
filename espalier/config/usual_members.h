// Members of published configurations that have names of their own, under the names of transformers' other families.
#pragma once

#include "espalier/base/json_fwd.h"
#include "espalier/shape/config_members.h"

namespace espalier {

// A Kimi Linear configuration, as published or as transformers writes it, under the names that other families use for
// the same members, and without the members of rotation. Errors: InputError for a damaged linear_attn_config,
// UnsupportedError for members that mean another model.
Json usual_members_of_kimi(const Members& config);

// A configuration of Sarvam's model with latent attention, as published or as transformers writes it, under the names
// of DeepSeek-V3's members. Errors: UnsupportedError for members that mean another model.
Json usual_members_of_sarvam_mla(const Members& config);

// The same of Sarvam's model with attention over heads, under the names of GLM-4.5's members.
Json usual_members_of_sarvam_moe(const Members& config);

// A configuration of Gemma 4's text model with the values that transformers gives to absent members of layers: their
// types, their rotations and the heads of those without a window. Errors: InputError; UnsupportedError for members that
// mean another model.
Json usual_members_of_gemma4(const Members& config);

}  // namespace espalier
