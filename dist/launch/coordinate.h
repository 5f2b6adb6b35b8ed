#pragma once
// An elastic run on several hosts. `train --coordinate HOST:PORT` is the process that looks after its ranks: it makes the
// views, as the launcher does on one host, but starts no rank. Any launcher does, with dist.master=HOST:PORT: srun,
// mpirun, torchrun, or RANK and WORLD_SIZE set by hand. A rank that is started again joins the run.

#include <memory>
#include <string>

#include "dist/launch/views.h"

namespace topknot {

// Waits until `ranks` ranks have come to `where`, for options.timeout_s, and looks after them until the run has ended.
// Returns the exit code, as run_spawned() does: a rank's connection that closes counts as its death, and one that hangs is
// shut out of the run, since it cannot be killed from here. kStopSignals stop all ranks. Throws UserError if the port cannot
// be had. From the main thread, before other threads are started.
int coordinate(const HostPort& where, int ranks, const DistOptions& options, double grace_s = 5);

// A rank's connection to the coordinator.
class Member {
 public:
  // Waits until the coordinator lets this rank begin or join: `plan`, which must be LaunchPlan::coordinated, then says
  // where, and from where it hears of views. Throws as TcpStoreClient, and UserError if the coordinator shuts it out.
  Member(LaunchPlan& plan, const DistOptions& options);
  // A rank that began tells ranks that join later.
  void tell_run(const std::string& fingerprint);
  // That of this process, for the coordinator to know once this and `plan` are gone; 1 until it is set.
  void set_exit_code(int code);

 private:
  std::shared_ptr<TcpStoreClient> connection_;
};

}  // namespace topknot
