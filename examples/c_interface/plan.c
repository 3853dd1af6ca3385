/* Plans one step for two rollouts that share a prompt of six tokens, and prints the plan. Exit code 0, or 1 with the error. */
#include <espalier/binding/core_interface.h>
#include <stdio.h>

int main(void) {
  const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 10, 11, 12, /* second rollout */ 1, 2, 3, 4, 5, 6, 20, 21};
  const int64_t starts[] = {0, 9, 17}, prompt_lengths[] = {6, 6};
  const espalier_rollouts rollouts = {2, tokens, starts, prompt_lengths};
  const espalier_shape shape = {.layers = 4, .hidden = 512, .inner = 2048, .heads = 8, .kv_heads = 2, .head_dim = 64, .vocabulary = 32000};
  const espalier_plan_request request = {.wave_tokens = 64, .threads = 1, .gradients = 1, .schedule = "phased",
                                         .share = "auto", .trunk_state = "keep", .dtype = "float32", .device = "cpu"};
  espalier_plan* plan = espalier_plan_new(&rollouts, &shape, &request);
  if (plan == NULL) {
    fprintf(stderr, "%s\n", espalier_last_error());
    return 1;
  }
  printf("%lld items\n%s\n", (long long)espalier_plan_items(plan), espalier_plan_text(plan));
  espalier_plan_delete(plan);
  return 0;
}
