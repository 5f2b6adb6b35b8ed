#pragma once
// What a test sets of the emulator is undone at its end.

#include "tests/emulator/machine.h"

namespace topknot::emulator {

struct Settings {
  Settings() = default;
  ~Settings() { reset(); }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;
};

// Blocks, threads and the branches of graphs run in the other order.
struct Reversed : Settings {
  Reversed() { machine().reverse = true; }
};

// The same, or, with a seed, blocks that take turns.
struct Reordered : Settings {
  explicit Reordered(unsigned seed) {
    machine().reverse = seed == 0;
    machine().interleave = seed;
  }
};

struct Gpus : Settings {
  explicit Gpus(int count) { machine().devices = count; }
};

}  // namespace topknot::emulator
