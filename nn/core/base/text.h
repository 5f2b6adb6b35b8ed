#pragma once
// Numbers in messages, as a person writes them: 2 and 0.05, not 2.000000 and 0.050000.

#include <string>

namespace topknot {

// At most six significant digits, no zeros at the end.
std::string short_text(double value);

}  // namespace topknot
