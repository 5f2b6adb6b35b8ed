#pragma once
// Labels are the numbers of classes, from 0 on.

#include <cstdint>

namespace topknot {

// In the place of a label, where a padded sequence has none: losses, their means and what is counted pass it over.
inline constexpr std::int32_t kNoLabel = -1;

}  // namespace topknot
