#pragma once
// Memory that cannot be had, said with what it was for.

#include <new>
#include <stdexcept>
#include <string>

#include "nn/base/check.h"

namespace topknot {

// "out of memory: WHAT (3.1 GB); ..." with the most that this process may have. `bytes`: 0 if unknown.
class OutOfMemory : public UserError {
 public:
  OutOfMemory(const std::string& what, double bytes);
};

// The most memory, in bytes, that this process may have: the machine's with swap, the limit of its container
// (cgroup) and of ulimit -v and -d, whichever is least.
double memory_limit();

// Address space, in bytes, that ulimit -v and -d leave to this process; a number beyond any where they are
// not set. Memory that is never touched counts too: a thread takes the whole of its stack, stack_bytes().
double address_room();
double stack_bytes();
// Throws UserError if the stacks of threads (ulimit -s, OMP_STACKSIZE) are smaller than kernels need, or
// larger than the memory: either would end the process without a word.
void check_stacks();

// The most threads that this user may start: the kernel's limit, the container's and that of ulimit -u.
double thread_limit();

// Returns make(). If memory runs out in it, throws OutOfMemory for `what`, of which `bytes` are known.
auto with_memory(const std::string& what, double bytes, auto&& make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // beyond what a container can hold at all
  } catch (const OutOfMemory&) {        // of a piece of it
  }
  throw OutOfMemory(what, bytes);
}

}  // namespace topknot
