#include "espalier/config/full_layers.h"

namespace espalier {

void read_full_layers(const Members& config, const Family& family, Reading& reading) {
  AttentionShape& full = reading.full_attention;
  full = reading.attention;
  full.head_dim = config.integer("global_head_dim", 1, 4096, family.full_head_dim);
  full.kv_heads = config.integer("num_global_key_value_heads", 1, full.heads, full.kv_heads);
  full.keys_as_values = config.flag("attention_k_eq_v", false);
  full.rotary = full.head_dim;
  if (full.heads % full.kv_heads != 0)
    config.fail("num_global_key_value_heads", text_of("a divisor of num_attention_heads = ", full.heads));
  if (full.head_dim % 2 != 0) config.fail("global_head_dim", text_of("even (it is ", full.head_dim, ")"));
}

}  // namespace espalier
