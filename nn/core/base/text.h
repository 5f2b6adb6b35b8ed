#pragma once
// Numbers in messages, as a person writes them: 2 and 0.05, not 2.000000 and 0.050000.

#include <string>

namespace topknot {

// At most six significant digits, no zeros at the end.
std::string short_text(double value);

// The shortest text that reads back to the same number: 0.1, 1e-4.
std::string format_number(double value);

}  // namespace topknot
