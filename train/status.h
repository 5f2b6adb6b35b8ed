#pragma once
// What `train status RUN` prints: how far a run is, read from its directory while it goes on or afterwards.

#include <string>

namespace topknot {

// One line each: the run; whether it is running, finished, stopped, failed (with the error) or was killed; steps, loss;
// throughput of the last steps and the time left; the last evaluation; the last checkpoint. Throws UserError where `run`
// is no run directory.
std::string status_text(const std::string& run);

// `train status RUN`, from "status" on. Prints status_text(); returns the exit code.
int status_command(int argc, const char* const* argv);

}  // namespace topknot
