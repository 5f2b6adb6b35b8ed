#pragma once
// The parameters of a network link, and the units in which users write them.

#include <string>

namespace topknot {

struct Link {
  double alpha = 0;     // seconds per message, sender to receiver
  double beta = 0;      // seconds per byte of one direction of a rank's link
  double overhead = 0;  // seconds that a further message at the same time adds
};

// Of a nominal rate, what TCP over Ethernet leaves to the payload.
inline constexpr double kTcpEfficiency = 0.96;

// Bits per second: "100mbit", "1gbit", "2.5gbit", "64kbit" (powers of 1000), or a plain number of 1 to 1e15; also 100Mbit. Throws
// UserError for anything else; `key` names in its message what was given.
double parse_rate(const std::string& key, const std::string& text);

// Seconds: "50us", "0.2ms", "1s", or a plain number of seconds, 0 to 10. Throws as parse_rate().
double parse_latency(const std::string& key, const std::string& text);

}  // namespace topknot
