#pragma once
// exchange.ranks_per_host: the ranks of a host sum their gradients dense, over a network that is fast, and
// what hosts send each other, over the network that is slow, is compressed. exchange.hierarchy says by whom.
//
// `parts`: HiTopKComm of Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
// Clusters (MLSys 2021, arXiv 2010.10458). A reduce-scatter leaves each rank of a host with a part
// of the sum; it selects in its part, the ranks of one index on all hosts gather their part's entries, all
// indices at once, and an all-gather inside the host ends the step. Each rank encodes a part and has a
// network card's share of the message; k counts in each part, so the selection is not that of `leader`.
//
// `leader`, simpler: every rank of a host has the whole sum and encodes the same message with the same
// residual, and its first rank alone talks across: no method need know of the hierarchy, k means the whole
// group's, and the selection is that of a run with as many ranks as hosts. The price: each rank encodes
// everything, and one connection a host carries the message.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/comm/ordered_sum.h"
#include "nn/base/host_device.h"
#include "nn/core/step.h"

namespace topknot {

// The hosts as ranks: size() is the number of hosts, rank() this host's. Every rank of a host makes the same
// call with the same bits; the first talks to the other hosts and hands the result to its neighbours.
class HierarchicalCommunicator : public Communicator {
 public:
  // Both outlive this. `inside`: the ranks of this host. `across`: the first ranks of all hosts, by host;
  // null on the other ranks.
  HierarchicalCommunicator(Communicator& inside, Communicator* across, int host, int hosts);

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    if (across_) across_->all_gather(mine, all);
    share(all);
  }
  void all_reduce(std::span<float> data, SumOrder order) override {
    if (across_) across_->all_reduce(data, order);
    inside_.broadcast(std::as_writable_bytes(data), 0);
  }
  void all_reduce(std::span<BFloat16> data, SumOrder order) override {
    if (across_) across_->all_reduce(data, order);
    inside_.broadcast(std::as_writable_bytes(data), 0);
  }
  void broadcast(std::span<std::byte> data, int root) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a host that does not exist");
    if (across_) across_->broadcast(data, root);
    inside_.broadcast(data, 0);
  }
  void all_to_all(std::span<const std::vector<std::byte>> mine,
                  std::vector<std::vector<std::byte>>& theirs) override {
    if (across_) across_->all_to_all(mine, theirs);
    share(theirs);
  }
  void send_receive(int to, std::span<const std::byte> mine, int from,
                    std::vector<std::byte>& theirs) override {
    theirs.clear();
    if (across_) across_->send_receive(to, mine, from, theirs);
    if (from >= 0 && inside_.size() > 1) topknot::share(inside_, theirs);
  }
  void barrier() override {
    inside_.barrier();
    if (across_) across_->barrier();
    inside_.barrier();
  }
  // Throws: split what this was made of.
  std::unique_ptr<Communicator> split(int) override { throw Error("a hierarchy of ranks cannot be split"); }
  void abort(const std::string& reason) noexcept override {
    inside_.abort(reason);
    if (across_) across_->abort(reason);
  }

 private:
  // The first rank's blocks to the others of the host.
  void share(std::vector<std::vector<std::byte>>& blocks);

  Communicator& inside_;
  Communicator* across_;
};

// Throws UserError if exchange.ranks_per_host is given for method dense.
void check_hierarchy(int ranks_per_host, bool compressing);
// Throws UserError if it does not divide the ranks. `whose`: what says how many they are, " of dist.ranks".
void check_hosts(int ranks_per_host, int ranks, const std::string& whose = "");

// Adds what one more rank of a host found in its part. The threshold is the least of a part with entries.
TOPKNOT_HOST_DEVICE void join_status(StepStatus& host, const StepStatus& rank) {
  host.bad |= rank.bad;
  if (rank.bad_rank >= 0 && (host.bad_rank < 0 || rank.bad_rank < host.bad_rank))
    host.bad_rank = rank.bad_rank;
  host.selected += rank.selected;
  host.over_capacity += rank.over_capacity;
  if (rank.threshold > 0 && (host.threshold == 0 || rank.threshold < host.threshold))
    host.threshold = rank.threshold;
}

// The ranks of a run as hosts: ranks 0 to ranks_per_host-1 are host 0, and so on.
class Hierarchy {
 public:
  // Collective, through the queue, which outlives this. Throws as check_hosts(). `parts`: each rank of a host
  // encodes a part of every group; else all encode the whole.
  Hierarchy(CollectiveQueue& queue, int ranks_per_host, bool parts);

  // Whether this rank talks to other hosts.
  bool leads() const { return across_ != nullptr; }
  // The hosts as ranks: of a part, the ranks of this rank's index on all hosts.
  Communicator& hosts() { return hosts_ ? *hosts_ : *across_; }
  // The two communicators of hosts(). inside(): the ranks of this host. across(): the ranks of this index on
  // all hosts; without parts only the first ranks have it, and it is null on the others.
  Communicator& inside() { return *inside_; }
  Communicator* across() { return across_.get(); }
  // Communicator::set_place() of both.
  void set_place(std::int64_t step, int group = -1) {
    inside_->set_place(step, group);
    if (across_) across_->set_place(step, group);
  }
  // How many parts a group has, which of them is this rank's, and where it lies in `numel` elements.
  int parts() const { return hosts_ ? 1 : inside_->size(); }
  int part() const { return hosts_ ? 0 : inside_->rank(); }
  ElementRange own(std::size_t numel) const { return slice_of(numel, parts(), part()); }

  // The step as one of hosts: `context` with this host's rank and the hosts' weights, each the mean of its
  // ranks', so of mean 1 as well. Valid to the next call; calls with the same weights return the same.
  StepContext begin_step(const StepContext& context);
  // This rank's weight in the step, and the sum of the weights of its host's ranks.
  float weight() const { return weight_; }
  float total() const { return total_; }
  // Collective over the ranks of a host; part of a queue's job. Turns each rank's gradient, in own(), into
  // the host's: sum_r(weight[r] * g_r) / sum_r(weight[r]), in rank order. Zero if all weights are.
  void average(std::span<float> gradient);
  // The same kind of call: every rank's own() of `values` to all.
  void gather(std::span<float> values);

 private:
  void reduce_scatter(std::span<float> gradient, std::span<float> sum);

  std::unique_ptr<Communicator> inside_, across_;
  std::unique_ptr<HierarchicalCommunicator> hosts_;  // null: parts
  int ranks_ = 1;
  std::vector<float> weights_;    // of the hosts
  float weight_ = 1, total_ = 1;  // of this rank, and of its host's ranks
};

}  // namespace topknot
