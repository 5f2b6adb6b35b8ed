#pragma once
// exchange.ranks_per_host: a pipeline around another one. The gradients of a host's ranks are summed first, and the inner
// pipeline encodes the sum. While the host sums one group, the message of the group before is encoded: sum 0, sum 1,
// message 0, sum 2, message 1, ...; the last one leaves in flush().

#include <memory>
#include <span>
#include <utility>

#include "dist/exchange/group_pipeline.h"
#include "dist/sparse/hierarchical.h"

namespace topknot {

class HostSum : public GroupPipeline {
 public:
  // `held`: shared by the groups of a rank. References outlive this.
  HostSum(std::unique_ptr<GroupPipeline> inner, Hierarchy& hierarchy, HostSum*& held)
      : hierarchy_(hierarchy), inner_(std::move(inner)), held_(held) {}

  void begin_step(const StepContext& info) override { inner_->begin_step(hierarchy_.begin_step(info)); }
  void encode(Slice slice) override { slice_ = slice; }
  void send() override {
    start(slice_.gradient);
    if (HostSum* const before = std::exchange(held_, this)) before->encode_and_send();
  }
  void flush() override {
    if (held_ == this) std::exchange(held_, nullptr)->encode_and_send();
  }
  bool decode() override { return inner_->decode(); }
  bool finite() const override { return inner_->finite(); }
  bool own_values_finite() const override { return inner_->own_values_finite(); }
  bool commit() override { return inner_->commit(); }
  void discard() override { inner_->discard(); }
  GradientForm form() const override { return inner_->form(); }
  // Bytes are those between hosts, which the first rank of a host sends and receives.
  void add_stats(ExchangeStats& stats) const override {
    const std::uint64_t sent = stats.bytes_sent, received = stats.bytes_received;
    inner_->add_stats(stats);
    if (!hierarchy_.leads()) stats.bytes_sent = sent, stats.bytes_received = received;
  }
  void save(StateWriter& writer) const override { inner_->save(writer); }
  void load(StateReader& reader) override { inner_->load(reader); }

 protected:
  // The sum of `gradient` inside the host, in place, as Hierarchy::average(): starts it, and lets encoding wait for it.
  virtual void start(std::span<float> gradient) = 0;
  virtual void wait() = 0;

  Hierarchy& hierarchy_;

 private:
  void encode_and_send() {
    wait();
    inner_->encode(slice_);
    inner_->send();
  }

  const std::unique_ptr<GroupPipeline> inner_;
  HostSum*& held_;
  Slice slice_;
};

}  // namespace topknot
