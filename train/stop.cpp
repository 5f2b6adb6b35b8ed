#include "train/stop.h"

namespace topknot {
namespace {

volatile std::sig_atomic_t received = 0;

void on_signal(int number) {
  received = number;
  std::signal(number, SIG_DFL);  // a second one ends the process
}

}  // namespace

void install_stop_handlers() {
  received = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

int stop_signal() {
  return received;
}

}  // namespace topknot
