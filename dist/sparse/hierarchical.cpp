#include "dist/sparse/hierarchical.h"

#include <fmt/format.h>

#include <cstdint>
#include <cstring>

#include "nn/base/check.h"

namespace topknot {

HierarchicalCommunicator::HierarchicalCommunicator(Communicator& inside, Communicator* across, int host,
                                                   int hosts)
    : Communicator({host, hosts, inside.backend(), inside.overlaps()}), inside_(inside), across_(across) {
  TOPKNOT_CHECK((across != nullptr) == (inside.rank() == 0), "the first rank of a host talks to the others");
}

void HierarchicalCommunicator::share(std::vector<std::vector<std::byte>>& blocks) {
  if (inside_.size() == 1) return;
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(size()));
  blocks.resize(lengths.size());
  std::vector<std::byte> together;
  if (across_)
    for (std::size_t host = 0; host < lengths.size(); ++host) {
      lengths[host] = blocks[host].size();
      together.insert(together.end(), blocks[host].begin(), blocks[host].end());
    }
  inside_.broadcast(std::as_writable_bytes(std::span(lengths)), 0);
  if (!across_) {
    std::uint64_t total = 0;
    for (const std::uint64_t length : lengths) total += length;
    together.resize(total);
  }
  inside_.broadcast(together, 0);
  if (across_) return;
  auto begin = together.cbegin();
  for (std::size_t host = 0; host < lengths.size(); ++host) {
    const auto end = begin + static_cast<std::ptrdiff_t>(lengths[host]);
    blocks[host].assign(begin, end);
    begin = end;
  }
}

void check_hierarchy(int ranks_per_host, bool compressing) {
  if (ranks_per_host != 0 && !compressing)
    throw UserError(
        "exchange.ranks_per_host: compress.name: dense needs no hierarchy, its sum takes each link once; "
        "leave it at 0");
}

void check_hosts(int ranks_per_host, int ranks, const std::string& whose) {
  if (ranks_per_host < 1 || ranks % ranks_per_host != 0)
    throw UserError(
        fmt::format("exchange.ranks_per_host: {} does not divide the {} ranks{} into hosts of one size",
                    ranks_per_host, ranks, whose));
}

Hierarchy::Hierarchy(CollectiveQueue& queue, int ranks_per_host, bool parts) {
  ranks_ = queue.communicator().size();
  const int rank = queue.communicator().rank();
  check_hosts(ranks_per_host, ranks_);
  const int host = rank / ranks_per_host;
  const int index = rank % ranks_per_host;
  queue.run([&](Communicator& all) {
    inside_ = all.split(host);
    // A rank that does not talk across is alone in its color, which costs no connections.
    across_ = all.split(parts ? index : index == 0 ? 0 : rank);
  });
  if (parts) return;
  if (index != 0) across_.reset();
  hosts_ = std::make_unique<HierarchicalCommunicator>(*inside_, across_.get(), host, ranks_ / ranks_per_host);
}

StepContext Hierarchy::begin_step(const StepContext& context) {
  TOPKNOT_CHECK(static_cast<int>(context.weights.size()) == ranks_, "one aggregation weight per rank");
  const std::size_t per_host = static_cast<std::size_t>(inside_->size());
  const std::size_t own = static_cast<std::size_t>(hosts().rank());
  weights_.resize(context.weights.size() / per_host);
  for (std::size_t host = 0; host < weights_.size(); ++host) {
    float total = 0;
    for (const float weight : context.weights.subspan(host * per_host, per_host)) total += weight;
    if (host == own) total_ = total;
    weights_[host] = total / static_cast<float>(per_host);
  }
  weight_ = context.weights[own * per_host + static_cast<std::size_t>(inside_->rank())];
  StepContext of_hosts = context;
  of_hosts.weights = weights_;
  of_hosts.rank = hosts().rank();
  return of_hosts;
}

void Hierarchy::average(std::span<float> gradient) {
  if (weight_ != 1.0f)
    for (float& value : gradient) value *= weight_;
  const ElementRange own = this->own(gradient.size());
  const std::span<float> sum = gradient.subspan(own.begin, own.size());
  if (parts() == 1)
    inside_->all_reduce(gradient, SumOrder::ranks);
  else
    reduce_scatter(gradient, sum);
  if (total_ == 0.0f || total_ == 1.0f) return;
  for (float& value : sum) value /= total_;
}

void Hierarchy::reduce_scatter(std::span<float> gradient, std::span<float> sum) {
  std::vector<std::vector<std::byte>> mine, theirs;
  for (int rank = 0; rank < parts(); ++rank) {
    const ElementRange part = slice_of(gradient.size(), parts(), rank);
    const auto bytes = std::as_bytes(gradient.subspan(part.begin, part.size()));
    mine.emplace_back(bytes.begin(), bytes.end());
  }
  inside_->all_to_all(mine, theirs);
  std::vector<const float*> parts_of_sum;
  for (const auto& block : theirs) {
    TOPKNOT_CHECK(block.size() == sum.size_bytes(), "a part of another length");
    parts_of_sum.push_back(reinterpret_cast<const float*>(block.data()));
  }
  ordered_sum(std::span<const float* const>(parts_of_sum), sum.data(), sum.size());
}

void Hierarchy::gather(std::span<float> values) {
  const ElementRange own = this->own(values.size());
  std::vector<std::vector<std::byte>> all;
  inside_->all_gather(std::as_bytes(values.subspan(own.begin, own.size())), all);
  for (int rank = 0; rank < parts(); ++rank) {
    const ElementRange part = slice_of(values.size(), parts(), rank);
    const auto& block = all[static_cast<std::size_t>(rank)];
    TOPKNOT_CHECK(block.size() == part.size() * sizeof(float), "a part of another length");
    std::memcpy(values.data() + part.begin, block.data(), block.size());
  }
}

}  // namespace topknot
