#pragma once
// exchange.ranks_per_host: the ranks of a host sum their gradients dense, over a network that is fast, and
// every host sends one compressed message, over the network that is slow.
//
// After Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters (MLSys
// 2021, arXiv 2010.10458), HiTopKComm, in a simpler form. There, a reduce-scatter leaves each rank of a host
// with a part of the sum; it selects in its part, its part's entries are gathered across the hosts by all
// ranks at once, and an all-gather inside the host ends the step. Here every rank of a host has the whole sum
// and encodes the same message with the same residual, and its first rank alone talks across: no method need
// know of the hierarchy, k means the whole group's, and the selection is that of a run with as many ranks as
// hosts. The price: each rank encodes everything, and one connection a host carries the message.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"

namespace topknot {

// The hosts as ranks: size() is the number of hosts, rank() this host's. Every rank of a host makes the same
// call with the same bits; the first talks to the other hosts and hands the result to its neighbours.
class HierarchicalCommunicator : public Communicator {
 public:
  // Both outlive this. `inside`: the ranks of this host. `across`: the first ranks of all hosts, by host;
  // null on the other ranks.
  HierarchicalCommunicator(Communicator& inside, Communicator* across, int host, int hosts);

  int rank() const override { return host_; }
  int size() const override { return hosts_; }
  std::string backend() const override { return inside_.backend(); }
  bool overlaps() const override { return inside_.overlaps(); }

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override;
  void all_reduce(std::span<float> data, SumOrder order) override;
  void all_reduce(std::span<BFloat16> data, SumOrder order) override;
  void all_reduce(std::span<double> data) override;
  void broadcast(std::span<std::byte> data, int root) override;
  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override;
  void send_receive(int to, std::span<const std::byte> mine, int from,
                    std::vector<std::byte>& theirs) override;
  void barrier() override;
  // Throws: split what this was made of.
  std::unique_ptr<Communicator> split(int color) override;
  void set_place(std::int64_t step, int group = -1) override;
  void abort(const std::string& reason) noexcept override;

 private:
  // The first rank's bytes, and its blocks, to the others of the host.
  void share(std::vector<std::byte>& bytes);
  void share(std::vector<std::vector<std::byte>>& blocks);

  Communicator& inside_;
  Communicator* across_;
  int host_, hosts_;
};

// Throws UserError if exchange.ranks_per_host is given for method dense.
void check_hierarchy(int ranks_per_host, bool compressing);
// Throws UserError if it does not divide the ranks. `whose`: what says how many they are, " of dist.ranks".
void check_hosts(int ranks_per_host, int ranks, const std::string& whose = "");

// The ranks of a run as hosts: ranks 0 to ranks_per_host-1 are host 0, and so on.
class Hierarchy {
 public:
  // Collective, through the queue, which outlives this. Throws as check_hosts().
  Hierarchy(CollectiveQueue& queue, int ranks_per_host);

  // Whether this rank talks to other hosts.
  bool leads() const { return inside_->rank() == 0; }
  Communicator& hosts() { return *hosts_; }
  // What hosts() is made of: the ranks of this host; the first ranks of all hosts, null if this rank is none.
  Communicator& inside() { return *inside_; }
  Communicator* across() { return across_.get(); }

  // The step as one of hosts: `context` with this host's rank and the hosts' weights, each the mean of its
  // ranks', so of mean 1 as well. Valid to the next call; calls with the same weights return the same.
  StepContext begin_step(const StepContext& context);
  // Of the step: this rank's weight, and the sum of its host's ranks' weights.
  float weight() const { return weight_; }
  float total() const { return total_; }
  // Collective over the ranks of a host; part of a queue's job. Turns each rank's gradient into the host's:
  // sum_r(weight[r] * g_r) / sum_r(weight[r]), summed in rank order, the same bits on all of them. Zero where
  // all weights of the host are.
  void average(std::span<float> gradient);

 private:
  std::unique_ptr<Communicator> inside_, across_;
  std::unique_ptr<HierarchicalCommunicator> hosts_;
  int ranks_ = 1;
  std::vector<float> weights_;    // of the hosts
  float weight_ = 1, total_ = 1;  // of this rank, and of its host's ranks
};

}  // namespace topknot
