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

void __tsan_read1(void* at) {
  access(at, 1, Access::read, __builtin_return_address(0));
}
void __tsan_read2(void* at) {
  access(at, 2, Access::read, __builtin_return_address(0));
}
void __tsan_read4(void* at) {
  access(at, 4, Access::read, __builtin_return_address(0));
}
void __tsan_read8(void* at) {
  access(at, 8, Access::read, __builtin_return_address(0));
}
void __tsan_read16(void* at) {
  access(at, 16, Access::read, __builtin_return_address(0));
}
void __tsan_read_range(void* at, unsigned long bytes) {
  access(at, bytes, Access::read, __builtin_return_address(0));
}
void __tsan_unaligned_read2(void* at) {
  access(at, 2, Access::read, __builtin_return_address(0));
}
void __tsan_unaligned_read4(void* at) {
  access(at, 4, Access::read, __builtin_return_address(0));
}
void __tsan_unaligned_read8(void* at) {
  access(at, 8, Access::read, __builtin_return_address(0));
}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

void __tsan_write1(void* at) {
  access(at, 1, Access::write, __builtin_return_address(0));
}
void __tsan_write2(void* at) {
  access(at, 2, Access::write, __builtin_return_address(0));
}
void __tsan_write4(void* at) {
  access(at, 4, Access::write, __builtin_return_address(0));
}
void __tsan_write8(void* at) {
  access(at, 8, Access::write, __builtin_return_address(0));
}
void __tsan_write16(void* at) {
  access(at, 16, Access::write, __builtin_return_address(0));
}
void __tsan_write_range(void* at, unsigned long bytes) {
  access(at, bytes, Access::write, __builtin_return_address(0));
}
void __tsan_unaligned_write2(void* at) {
  access(at, 2, Access::write, __builtin_return_address(0));
}
void __tsan_unaligned_write4(void* at) {
  access(at, 4, Access::write, __builtin_return_address(0));
}
void __tsan_unaligned_write8(void* at) {
  access(at, 8, Access::write, __builtin_return_address(0));
}

// Host code beside the kernels has atomics too: shared pointers, statics.
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
unsigned __tsan_atomic32_fetch_add(volatile unsigned* at, unsigned by, int) {
  return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);
}
unsigned __tsan_atomic32_load(const volatile unsigned* at, int) {
  access(const_cast<const unsigned*>(at), 4, Access::atomic_read, __builtin_return_address(0));
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(volatile unsigned* at, unsigned value, int) {
  access(const_cast<const unsigned*>(at), 4, Access::atomic_write, __builtin_return_address(0));
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}
unsigned long __tsan_atomic64_load(const volatile unsigned long* at, int) {
  access(const_cast<const unsigned long*>(at), 8, Access::atomic_read, __builtin_return_address(0));
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
void __tsan_atomic64_store(volatile unsigned long* at, unsigned long value, int) {
  access(const_cast<const unsigned long*>(at), 8, Access::atomic_write, __builtin_return_address(0));
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}

}  // extern "C"
