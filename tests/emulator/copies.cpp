// Copies to shared memory that go on while the thread does (cp.async), carried out as late as they may be.
#include <array>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "nn/base/check.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/races.h"

namespace topknot::emulator {
namespace {

constexpr std::size_t kBytes = 16;

struct Copy {
  void* to;
  const void* from;
  bool real;
};
// Of a thread of the block.
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> closed;
};
Copies& copies() {
  static thread_local std::array<Copies, 1024> by_thread;
  return by_thread[place().thread.x];
}

}  // namespace

// From here on the copy may write, until it has been waited for.
void begin_copy(void* to_shared, const void* from, bool real) {
  if ((reinterpret_cast<std::uintptr_t>(to_shared) | reinterpret_cast<std::uintptr_t>(from)) % kBytes != 0)
    throw Error("cp.async of 16 bytes that are not aligned");
  if (real) races::access(from, kBytes, races::Access::read, __builtin_return_address(0));
  races::access(to_shared, kBytes, races::Access::write, __builtin_return_address(0));
  copies().open.push_back({to_shared, from, real});
}

void close_copies() {
  Copies& mine = copies();
  mine.closed.push_back(std::exchange(mine.open, {}));
}

void await_copies(std::size_t left) {
  auto& closed = copies().closed;
  for (; closed.size() > left; closed.pop_front())
    for (const Copy& copy : closed.front()) {
      races::access(copy.to, kBytes, races::Access::write, __builtin_return_address(0));
      if (copy.real)
        std::memcpy(copy.to, copy.from, kBytes);
      else
        std::memset(copy.to, 0, kBytes);
    }
}

}  // namespace topknot::emulator
