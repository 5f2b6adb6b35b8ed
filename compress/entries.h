#pragma once
// One rank's entries of a group, as sent or as received.

#include <cstdint>
#include <vector>

namespace topknot {

template <class T>
struct Entries {
  bool finite = true;                  // false: the sender saw a NaN or Inf; nothing else travels then
  std::vector<std::uint32_t> indices;  // positions in the group, strictly ascending
  std::vector<T> values;
};

}  // namespace topknot
