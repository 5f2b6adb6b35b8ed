#include "nn/core/base/program.h"

#include <csignal>
#include <cstdio>

#include "nn/core/base/log.h"

namespace topknot {
namespace {

volatile std::sig_atomic_t received = 0;

void on_signal(int number) {
  received = number;
  std::signal(number, SIG_DFL);  // a second one ends the process
}

void report(const char* name, const char* kind, const char* message) {
  if (name)
    std::fprintf(stderr, "%s: %s%s\n", name, kind, message);
  else
    log_error(message);
}

}  // namespace

int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv) {
  try {
    return body(argc, argv);
  } catch (const UserError& error) {
    report(name, "", error.what());
    return 2;
  } catch (const Interrupted& error) {
    report(name, "", error.what());
    return 128 + stop_signal();
  } catch (const std::exception& error) {
    report(name, "unexpected error: ", error.what());
    return 1;
  }
}

void install_stop_handlers() {
  received = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

int stop_signal() {
  return received;
}

}  // namespace topknot
