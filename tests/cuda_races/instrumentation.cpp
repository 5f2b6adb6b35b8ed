// What the compiler calls for the accesses of kernels that it compiles with -fsanitize=thread, in place of that
// sanitizer's own library. Names and arguments are the compiler's.
#include "tests/emulator/races.h"

using topknot::emulator::races::access;
using topknot::emulator::races::Access;

extern "C" {

void __tsan_init() {
  topknot::emulator::races::watch();
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ACCESSES(kind)                                            \
  PLAIN_ACCESS(kind, kind##1, 1)                                  \
  PLAIN_ACCESS(kind, kind##2, 2)                                  \
  PLAIN_ACCESS(kind, kind##4, 4)                                  \
  PLAIN_ACCESS(kind, kind##8, 8)                                  \
  PLAIN_ACCESS(kind, kind##16, 16)                                \
  PLAIN_ACCESS(kind, unaligned_##kind##2, 2)                      \
  PLAIN_ACCESS(kind, unaligned_##kind##4, 4)                      \
  PLAIN_ACCESS(kind, unaligned_##kind##8, 8)                      \
  void __tsan_##kind##_range(void* at, unsigned long bytes) {     \
    access(at, bytes, Access::kind, __builtin_return_address(0)); \
  }
#define PLAIN_ACCESS(kind, name, bytes)                           \
  void __tsan_##name(void* at) {                                  \
    access(at, bytes, Access::kind, __builtin_return_address(0)); \
  }
ACCESSES(read)
ACCESSES(write)
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// Host code beside the kernels has atomics too: shared pointers, statics.
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
unsigned __tsan_atomic32_fetch_add(volatile unsigned* at, unsigned by, int) {
  return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);
}
#define ATOMICS(bits, type)                                                                           \
  type __tsan_atomic##bits##_load(const volatile type* at, int) {                                     \
    access(const_cast<const type*>(at), bits / 8, Access::atomic_read, __builtin_return_address(0));  \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                   \
  void __tsan_atomic##bits##_store(volatile type* at, type value, int) {                              \
    access(const_cast<const type*>(at), bits / 8, Access::atomic_write, __builtin_return_address(0)); \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                    \
  }
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long)

}  // extern "C"
