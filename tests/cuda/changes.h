// Before the kernels that mutate_kernels.py writes: every place that it changes asks here which of its two forms to
// take. The chosen change is one of all; the others leave the kernel as it is.
#pragma once

namespace espalier::changes {

inline constexpr int kMost = 96 * 1024;
struct State {
  int chosen;
  unsigned char met[kMost];  // by number: whether its place was reached
};
extern State state __attribute__((visibility("hidden")));

// By assembly, of which ThreadSanitizer tells nobody: threads of a grid come by one place.
inline bool on(int id) {
  int chosen;
  asm volatile("movb $1, %0\n\tmovl %2, %1" : "=m"(state.met[id]), "=&r"(chosen) : "m"(state.chosen));
  return chosen == id;
}

inline int number(int id, int value) { return on(id) ? value + 1 : value; }

#define ESPALIER_CHANGE(name, operation, opposite)              \
  template <class A, class B>                                   \
  inline auto name(int id, A a, B b)->decltype(a operation b) { \
    if constexpr (requires { a opposite b; })                   \
      return on(id) ? a opposite b : a operation b;             \
    else                                                        \
      return a operation b;                                     \
  }
ESPALIER_CHANGE(less, <, <=)
ESPALIER_CHANGE(less_or_equal, <=, <)
ESPALIER_CHANGE(greater, >, >=)
ESPALIER_CHANGE(greater_or_equal, >=, >)
ESPALIER_CHANGE(equal, ==, !=)
ESPALIER_CHANGE(unequal, !=, ==)
ESPALIER_CHANGE(plus, +, -)
ESPALIER_CHANGE(minus, -, +)
ESPALIER_CHANGE(times, *, /)
ESPALIER_CHANGE(over, /, *)
ESPALIER_CHANGE(modulo, %, /)
#undef ESPALIER_CHANGE

template <class A, class B>
inline A& add_to(int id, A& a, B b) {
  return on(id) ? a -= b : a += b;
}
// a && b, changed a || b; and the other way round. The second operand runs as it would.
template <class B>
inline bool both(int id, bool a, B&& b) {
  return on(id) ? a || b() : a && b();
}
template <class B>
inline bool either(int id, bool a, B&& b) {
  return on(id) ? a && b() : a || b();
}

}  // namespace espalier::changes
