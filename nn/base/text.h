#pragma once
// Text in messages: numbers as a person writes them, text made safe to print, "did you mean"; and quantiles.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

// At most six significant digits, no zeros at the end: 2 and 0.05, not 2.000000 and 0.050000.
std::string short_text(double value);
// "1 rank", "3 ranks"
std::string count_text(std::int64_t count, const std::string& what);
// "1:02:03", "4:05"
std::string format_duration(double seconds);
// "1.2 kB", "3.4 MB": powers of 1000
std::string format_bytes(double bytes);
// `bytes` compared with a dense exchange's: "3.2 times less than", "1.8 times more than", "as much as".
std::string compared_bytes(double bytes, double dense);

// Text that came from elsewhere, safe to print: what could move a terminal's cursor or is no UTF-8 becomes
// \xNN; line breaks and tabs stay. At most `longest` bytes of it.
std::string printable(std::string_view text, std::size_t longest = 4000);
// The same in one line, which cannot pass for lines of the program: line breaks and tabs become \n and \t.
std::string one_line(std::string_view text, std::size_t longest = 4000);

// Takes the first line off `rest`; `line` lacks its "\n" or "\r\n", if it has one. False if nothing is left.
bool next_line(std::string_view& rest, std::string_view& line);

std::string host_name();  // of this machine; "unknown" where it has none

// The text of errno after a call that has just failed; an input/output error if errno is 0.
std::string errno_text();

// The q-quantile (0 to 1) of values, linear between neighbours; 0 if there are none.
double quantile(std::vector<double> values, double q);

// The shortest text that reads back to the same number: 0.1, 1e-4.
std::string format_number(double value);

// The shortest of `known` that extends `name` or differs in its last number, else the nearest by 2 (or a
// third) edits, or "".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// "unknown compressor 'top_k'; did you mean 'topk'? known: dense, topk", or "'resnet20' or 'resnet110'?"
std::string unknown_name_message(const std::string& kind, const std::string& name,
                                 const std::vector<std::string>& known);

}  // namespace topknot
