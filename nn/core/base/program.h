#pragma once
// What every program's main shares: errors turned into exit codes, and the signals that ask for a stop.

#include <string>

#include "nn/core/base/check.h"

namespace topknot {

// Thrown where work ends early because stop_signal() was seen.
struct Interrupted : Error {
  using Error::Error;
};

// Returns what `body` returns. An exception ends in one message on standard error and an exit code: UserError
// 2, Interrupted 128 + signal, anything else 1. The message begins with `name`; where that is null it is
// logged as an error, with the rank (nn/core/base/log.h).
int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv);

// Installs handlers for SIGINT and SIGTERM, process-wide: they set a flag, nothing else. The first signal asks
// for a stop; a second one of the same kind ends the process at once.
void install_stop_handlers();
// The signal that asked for a stop, or 0.
int stop_signal();

}  // namespace topknot
