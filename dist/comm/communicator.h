#pragma once
// The collectives a trainer needs, over one group of ranks, and the backends (dist.backend) by which ranks
// start and talk. Calls are collective: every rank makes the same calls in the same order. Two threads never
// talk on one communicator at once (dist/comm/collective_queue.h sees to that).
//
// Every wait has a deadline: a call throws CollectiveError when a peer died, called abort(), or did not come
// within the timeout, and Interrupted (nn/base/program.h) if nothing happens after a stop signal.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm/link.h"
#include "dist/rendezvous/socket.h"
#include "nn/base/registry.h"
#include "nn/core/bfloat16.h"

namespace topknot {

// How floats are added.
enum class SumOrder {
  ranks,    // ((g0 + g1) + g2) + ...: the same bits on every backend
  library,  // as the backend is fastest; the same bits on every rank and in every run of that backend
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  int rank() const { return traits_.rank; }
  int size() const { return traits_.size; }
  // "rank 3": how messages call rank r of this communicator.
  std::string rank_name(int r) const { return topknot::rank_name(run_ranks(), r); }
  const std::string& backend() const { return traits_.backend; }  // "threads", "gloo"
  // The backend and the emulated link, if any, for messages to users: "threads, emulated link 100mbit, 50us".
  std::string network() const { return traits_.link.empty() ? backend() : backend() + ", " + traits_.link; }
  // Whether collectives may run on a thread of their own during the backward pass.
  bool overlaps() const { return traits_.overlaps; }

  // Gathers a block of bytes from each rank; lengths may differ (0 too). all[r] is rank r's, own included.
  virtual void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) = 0;
  // Sums in place over the ranks; the same length everywhere. Every rank ends with the same bits.
  virtual void all_reduce(std::span<float> data, SumOrder order) = 0;
  // The same of bfloat16: floats are added; rounded once in the order of ranks, after each in the library's.
  virtual void all_reduce(std::span<BFloat16> data, SumOrder order) = 0;
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  // Sends mine[r] to each rank r; theirs[r] is what rank r sent here, own included. Lengths may differ.
  virtual void all_to_all(std::span<const std::vector<std::byte>> mine,
                          std::vector<std::vector<std::byte>>& theirs) = 0;
  // Sends `mine` to rank `to` and receives what rank `from` sends in the same call; -1 for either: none.
  // Collective as the others: every rank calls, those without a part with -1 twice, and a receiver names
  // its sender. No rank sends to itself. `theirs` is emptied where there is no sender.
  virtual void send_receive(int to, std::span<const std::byte> mine, int from,
                            std::vector<std::byte>& theirs) = 0;
  virtual void barrier() = 0;

  // A communicator of those ranks that give the same color, in the order of their ranks here. Collective; it
  // lives next to this one and may outlive it. Aborting this one aborts its splits, not the other
  // way round. Calls on both are made by one thread, in the same order on all ranks that they share.
  virtual std::unique_ptr<Communicator> split(int color) = 0;

  // Ends the peers' calls with `reason` at once; this rank's later calls throw. From any thread.
  virtual void abort(const std::string& reason) noexcept = 0;

  // Sets the step (counted from 1) and merge group (-1: not known) that error messages name for the calls
  // that follow. Called from the thread that makes the calls.
  void set_place(std::int64_t step, int group = -1) { step_ = step, group_ = group; }

  // Why this group has ended, as far as this rank knows without a call; "" while it runs. From any thread.
  virtual std::string first_error() { return ""; }
  // Used by collectives that the same ranks run next to this communicator, on GPUs. Thread-safe; returns
  // whether every peer was heard of lately, as far as is known without waiting.
  virtual bool peers_alive() { return true; }

 protected:
  struct Traits {
    int rank = 0, size = 1;
    std::string backend;
    bool overlaps = false;
    std::string link = "";    // the emulated one, in words
    RunRanks run_ranks = {};  // of a split
  };
  explicit Communicator(Traits traits) : traits_(std::move(traits)) {}

  const RunRanks& run_ranks() const { return traits_.run_ranks; }
  // ", step 12, group 3"
  std::string place() const;
  // Returns what abort() publishes: the first error alone if the reason tells of one, with its rank.
  std::string published(const std::string& reason) const;

 private:
  const Traits traits_;
  std::int64_t step_ = -1;
  int group_ = -1;
};

// Collective. Sums in place over the ranks, in rank order: for metrics and evaluation, of a few numbers.
void sum_doubles(Communicator& communicator, std::span<double> data);

// Collective. Rank 0's values, on every rank: their number, then their bytes.
void share(Communicator& communicator, auto& values) {
  std::uint64_t size = values.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0);
  values.resize(size);
  communicator.broadcast(std::as_writable_bytes(std::span(values)), 0);
}

// Collective. Every rank's text, by rank.
std::vector<std::string> gather_texts(Communicator& communicator, const std::string& mine);

// Collective, before all ranks throw the same error: the first to throw must not end the others' all_gather.
void meet_to_throw(Communicator& communicator);

// Collective. Throws the same UserError on every rank when the ranks' `value` of `what` differ (a
// configuration, a binary's version, parameter names and shapes), naming the first that differs.
void check_same(Communicator& communicator, const std::string& what, const std::string& value);

// For backends: what is wrong with a send_receive whose `partners` are, by rank, (to, from); "" if each
// receiver that is named names its sender, and the other way round.
std::string unmatched_partners(std::span<const std::pair<int, int>> partners, const RunRanks& run_ranks);

// How a process joins its group.
struct JoinOptions {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // of the store, dist.master
  int port = 0;
  bool serve_store = false;  // rank 0 serves the store; false if the launcher does
  bool launcher_serves = false;
  std::string interface;     // dist.interface: network interface; "": the one that reaches the store
  std::string nccl;          // dist.nccl
  double timeout_s = 300;    // dist.timeout_s; 0: no limit
  std::string token = "";    // of the job: the store takes ranks with the same one only
  bool check_calls = false;  // compare operation, sequence number and size across ranks before every call
  RunRanks run_ranks = {};   // of a split
  MeetingPatience meeting = {};
};

// How ranks start and talk. `nccl`, which is gloo with NCCL next to it, registers in communicator.cpp.
struct Backend {
  std::string needs;  // of the machine, in words, for messages
  // Joins the group as one of its processes; collective. Null: the ranks are threads of one process.
  std::unique_ptr<Communicator> (*join)(const JoinOptions& options) = nullptr;
  // Why this machine or this build cannot use the backend, "" if it can. Null: every machine can.
  std::string (*problem)() = nullptr;
};
Registry<Backend>& backends();

// `threads` (dist/comm/threads_communicator.cpp): one communicator for each rank, to be used by one thread
// each. timeout_s <= 0: no deadline. `link`: collectives go over it.
std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks, double timeout_s,
                                                             const std::optional<EmulatedLink>& link = {});

// Runs body once per rank, each on a thread of its own, and waits for all of them. When a rank throws, the
// others' calls end with its error. Then the error of the rank that aborted first is thrown here.
void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body,
                      const std::optional<EmulatedLink>& link = {});

// `gloo` (dist/comm/gloo_communicator.cpp). Collective over all ranks. Throws UserError (port in use, unknown
// host) or CollectiveError (a rank did not come).
std::unique_ptr<Communicator> make_gloo_communicator(const JoinOptions& options);

// dist.nccl, "ALGO=Ring IB_HCA=mlx5_0,mlx5_1", as environment: NCCL_ALGO and NCCL_IB_HCA. UserError.
std::vector<std::pair<std::string, std::string>> nccl_variables(const std::string& settings);
// Host, PCI address and host name of a GPU, by lines: what NCCL takes for its identity.
std::string gpu_place(int gpu);

}  // namespace topknot
