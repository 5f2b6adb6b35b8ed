#pragma once
// Which rank this process is, and how the others start. One program serves all launchers:
//
// - `threads`: one process, dist.ranks threads.
// - `gloo` under torchrun, mpirun (Open MPI), srun, or a launcher that sets PMI_RANK: this process is one
//   rank, given by the environment. The ranks meet at dist.master.
// - `gloo` with dist.ranks > 1 and no launcher: this process starts dist.ranks copies of itself on this
//   machine, supervises them and serves their rendezvous.
// - `nccl`: as `gloo`, which carries its host-side collectives.
//
// When a rank dies, all end; or with elastic.min_ranks the others go on without it: those that this program started, or
// those whose launchers give them `train --coordinate` as dist.master.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/comm/link.h"

namespace topknot {

// The keys `dist.*` of the same names.
struct DistKeys {
  std::string backend = "threads";  // a registered one, or auto
  std::string master;               // HOST:PORT; "": from the environment
  std::string interface;            // of gloo and nccl, such as eth0; "": theirs to choose
  std::string nccl;                 // NAME=VALUE ...
  double timeout_s = 300;           // 0: no limit
  std::string token;                // "": TOPKNOT_TOKEN, or the launcher's name of the job
};

struct DistOptions : DistKeys {
  std::optional<int> ranks;          // dist.ranks, where the user gave it
  bool ranks_insist = false;         // given for this run: a launcher with another number is then an error
  std::optional<EmulatedLink> link;  // dist.link, between ranks that are threads
  bool check_calls = false;          // see JoinOptions
  int min_ranks = 0;                 // elastic.min_ranks
  int respawns = 0;                  // elastic.respawns
  std::string run;                   // identifies configuration and data, for ranks that are started again
};

struct LaunchPlan {
  enum class Kind {
    threads,  // run `size` ranks as threads of this process
    process,  // be rank `rank` of `size`
    spawn,    // start `size` copies of this process and look after them
  };
  Kind kind = Kind::threads;
  std::string launcher;  // "torchrun", "mpirun", "srun", "PMI", "spawn", or "" for none
  int rank = 0, size = 1;
  int local_rank = -1;  // among the ranks of this machine; -1: not given by the launcher
  std::string host;     // of the rendezvous; "" if size is 1
  int port = 0;
  std::string token;  // of the job (TOPKNOT_TOKEN, or the launcher's name for it); "": none
  // Of elastic runs (dist/launch/views.h). `host` and `port` are those of `train --coordinate`.
  bool coordinated = false;
  // A rank that joins a run which goes on, in a view after this one; 0: it is there from the start.
  int joins_after = 0;
  std::string run;                     // such a rank's: DistOptions::run of those that began
  std::function<std::string()> views;  // what this rank has been told of views
  MeetingPatience meeting = {};
};

// The value of an environment variable, or nullopt.
using Environment = std::function<std::optional<std::string>(const std::string&)>;
Environment process_environment();

// The environment's token of the job: the user's, else the launcher's name of it, one for all ranks.
std::string job_token(const std::string& launcher, const Environment& environment);

// dist.backend: auto is threads, unless a launcher started this process as one of several. Throws UserError:
// unknown backend, ranks that cannot be, dist.ranks that contradicts the launcher, launchers that contradict
// each other, no master.
LaunchPlan plan_launch(const DistOptions& options, const Environment& environment);

// "DESCRIPTOR:INODE" of an open file, by which run_spawned() lets its copies know that it started them; "" of
// another.
std::string file_name(int descriptor);

// How many of a job's `ranks` run on this machine: as many as the launcher says; all of them if it does not,
// or if this program starts them itself.
int local_ranks(int ranks, const Environment& environment);

// Which of a machine's `gpus` this process is to use: by its local rank, else by its rank, modulo the number
// of GPUs (a launcher may show each process its own only). Threads share the first.
int gpu_of(const LaunchPlan& plan, int gpus);

// The process of a spawned rank ends with its launcher, without which it would run unsupervised; Error if that has ended.
void end_with_launcher();

// For Kind::process: joins the group. Collective; throws as make_gloo_communicator does. For nccl and auto,
// the variables of dist.nccl are set, and NCCL_SOCKET_IFNAME becomes dist.interface, unless they are set
// already.
std::unique_ptr<Communicator> join_group(const LaunchPlan& plan, const DistOptions& options);

// The backend that dist.backend: auto takes for a group of processes, and the reason.
struct BackendChoice {
  std::string backend, reason;
};
// Collective; the same on every rank: nccl if no rank has a `problem` with it and every rank has a GPU of its
// own, by `place` (gpu_place()), else gloo.
BackendChoice choose_backend(Communicator& host, const std::string& problem, const std::string& place);

// For Kind::process: joins the group and runs body. An exception aborts the group, so that the other ranks
// end, and is thrown on.
void run_process_rank(const LaunchPlan& plan, const DistOptions& options,
                      const std::function<void(Communicator&)>& body);

// For Kind::spawn: starts `plan.size` copies of this program with the same arguments, which find
// plan_launch() answering Kind::process, and waits for them. When one dies (a signal, or an exit code other
// than 0), the others get grace_s to end by themselves, then SIGTERM, then SIGKILL. kStopSignals
// (nn/base/program.h) are passed on to all. The first error is logged last. Returns the exit code: 0, that of
// the rank whose failure ended the others, or 128 + its signal. The copies die with this process. To be
// called from the main thread, before other threads are started. `on_ready` runs once the meeting point is
// open, before the first copy starts.
//
// With options.min_ranks, a rank that is killed or leaves by a stop signal of its own does not end the others, once all
// have met and while so many are left: these are announced as the next View. A rank that hangs or does not come to it
// within options.timeout_s is killed. Ranks that died are started again, options.respawns in all; the others are told of
// a view with such a rank once it waits for them, and go over to it in their own time.
int run_spawned(const LaunchPlan& plan, const DistOptions& options, char* const* argv, double grace_s = 5,
                const std::function<void()>& on_ready = {});

// The cores that this process may use, and those next to a GPU: on hosts with several sockets, memory and bus
// are further from the others.

// "0-3,8,10-11" as Linux writes lists of cores; empty if it is no such list.
std::vector<int> parse_core_list(const std::string& list);

// Keeps this thread, and those that it starts from now on, to those of its cores that are next to the PCI
// device, such as "0000:3B:00.0". Returns how many these are; 0 if nothing changed: the system does not tell,
// none of them may be used, or all cores that may be used are near.
int keep_to_cores_near(const std::string& pci_device,
                       const std::filesystem::path& devices = "/sys/bus/pci/devices");

// The least CPU quota, in cores, of the control groups of a process (its /proc/PID/cgroup) and of those above
// them, version 1 or 2, mounted at `mount`. Infinity if there is none or it cannot be read.
double cpu_quota(const std::filesystem::path& groups = "/proc/self/cgroup",
                 const std::filesystem::path& mount = "/sys/fs/cgroup");

// The cores of the affinity mask, or the whole ones of the CPU quota if these are fewer; at least 1.
int usable_cores();

}  // namespace topknot
