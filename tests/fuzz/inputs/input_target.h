#pragma once
// Readers of bytes that come from outside, for `fuzz_inputs`. A target is one function, added by its file:
//
//   const bool added = [] {
//     input_targets().add("name", "what it reads", run);
//     return true;
//   }();
//
// It returns where the bytes are read, and throws Error where they are refused. Everything else is a finding:
// a crash, a sanitizer's report, another exception, ten seconds without an end, and Finding, where a property
// does not hold.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "nn/base/registry.h"

namespace topknot::fuzz {

using Bytes = std::span<const std::byte>;
using InputTarget = void (*)(Bytes input);
Registry<InputTarget>& input_targets();

// A property of what was read does not hold. The text says which.
class Finding : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw Finding(what);
}

inline std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A folder in memory for the files that a target reads, removed at the end of the process.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  // Writes a file of the folder anew; returns its path.
  std::string write(const std::string& name, Bytes content) const;
  void remove(const std::string& name) const;

 private:
  std::filesystem::path folder_;
};

// What one campaign of a target does; the same for both engines.
struct Campaign {
  std::string target;
  std::string corpus;     // folder of inputs to begin with
  std::string out = ".";  // folder for the input of a finding
  double seconds = 1;
  std::uint64_t seed = 1;
};

// Longer than any input of a correct reader takes, under sanitizers on a loaded machine.
inline constexpr std::chrono::seconds kHang{60};

// Runs one input. Returns where it is read or refused; else it throws.
void run_input(InputTarget target, Bytes input);
// Tries inputs until the time is over: libFuzzer where the compiler has it (engine_libfuzzer.cpp), else
// engine_plain.cpp. Returns an exit code, or ends the process with it; at a finding its input is a file in
// `out`.
int run_campaign(const Campaign& campaign, InputTarget target);

}  // namespace topknot::fuzz
