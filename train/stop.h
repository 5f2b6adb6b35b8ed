#pragma once
// A run ends early only where all ranks agree, at the end of a step. Signal handlers set a flag, nothing
// else.

#include <csignal>

namespace topknot {

// Installs handlers for SIGINT and SIGTERM: the first asks for a stop, a second one of either kind ends the
// process at once. Process-wide, as signals are.
void install_stop_handlers();
// The signal that asked for a stop, or 0.
int stop_signal();

}  // namespace topknot
