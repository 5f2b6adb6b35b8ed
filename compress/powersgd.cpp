// PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
// optimization", NeurIPS 2019, algorithms 1 and 2. Each tensor is a matrix M = gradient + residual, and
//
//   P = M Q, summed; P = an orthonormal basis of it; Q = M^T P, summed; average = P Q^T / ranks
//
// Q lives on as the next step's start (warm start), first Gaussian, the same on all ranks. Tensors that would
// shrink by less than compress.min_compression, and 1-D ones, are sent uncompressed with P.
//
// The residual is M - P Q^T with the rank's own Q, as in algorithm 2 (e_w = delta_w -
// decompress(C(delta_w))): what this rank's own projection leaves. The authors' code subtracts the *average*
// P Q^T instead. The sums of the residuals over the ranks are the same, and so are P, Q and every average,
// because these see the sums alone; but the authors' residuals also keep what sets each rank's gradient apart
// for ever. Further differences from that code: it leaves out compression for the first 100 steps; its
// Nesterov steps along g + m with m = lambda m + g, torch's, which is the optimizer's here, along g + lambda
// m; later versions compute P and Q in turn, one per step (that is acpsgd here).
//
// With aggregation weights w the sums are of w P and w Q, so sum(w residual) + ranks * average = sum(w M).

#include <limits>
#include <vector>

#include "compress/compressor.h"
#include "compress/lowrank/plan.h"
#include "compress/parallel.h"
#include "compress/state.h"

namespace topknot {
namespace {

class PowerSgd final : public lowrank::LowRankCompressor {
 public:
  PowerSgd(const CompressOptions& options, const GroupSpec& group)
      : LowRankCompressor(options, group, 1.0),
        start_(plan_.q_size()),
        own_q_(plan_.q_size()),
        q_(plan_.q_size()) {
    sum_.resize(plan_.p_size() + plan_.plain_size());  // P and the uncompressed tensors
    sent_ = sum_.size() + plan_.q_size();
    plan_.draw_q(start_);
  }

 private:
  void project(std::span<const float> u) override {
    plan_.product(u, start_, p());
    plan_.copy_plain(u, plain());
    multiply_all(sum_, weights_[rank_]);
    has_p_ = false;
  }

  std::optional<Message> receive(const Round& round) override {
    if (has_p_) {
      check_sum(round, q_);
      finite_ = lowrank::within(q_, plan_.bound());
      return std::nullopt;
    }
    check_sum(round, sum_);
    finite_ = lowrank::within(sum_, std::numeric_limits<float>::max());
    // All ranks have the same sum, so none of them sends more.
    if (!finite_ || !plan_.any()) return std::nullopt;
    has_p_ = true;
    plan_.orthonormalise_p(p());
    plan_.transposed_product(slice_.gradient, p(), own_q_);
    q_ = own_q_;
    multiply_all(q_, weights_[rank_]);
    // Such a rank's own product could overflow, which the others must learn.
    if (!lowrank::within(own_q_, plan_.bound())) q_[0] = std::numeric_limits<float>::infinity();
    return sum_message(q_);
  }

  void rebuild(std::span<float> u, std::span<float> average) override {
    const float factor = 1.0f / static_cast<float>(ranks_);
    multiply_all(q_, factor);
    multiply_all(plain(), factor);
    plan_.rebuild(u, average, has_residual_, {p(), own_q_}, {p(), q_}, plain());
    start_.swap(q_);
  }

  std::span<float> p() { return std::span(sum_).first(plan_.p_size()); }
  std::span<float> plain() { return std::span(sum_).subspan(plan_.p_size()); }

  void save(StateWriter& writer) const override {
    check_idle("state is saved between steps");
    writer.put_list(start_);
  }
  void load(StateReader& reader) override {
    check_idle("state is loaded between steps");
    start_ = lowrank::load_factor(reader, start_.size());
  }

  std::vector<float> start_;      // Q of the last committed step
  std::vector<float> own_q_, q_;  // this rank's, and the sum
  bool has_p_ = false;            // the sum of P is here, that of Q is on its way
};

const bool powersgd_registered =
    compressors().add("powersgd", "low-rank factors by one warm-started power iteration, two sums per step",
                      {make_as<Compressor, PowerSgd>,
                       [](const CompressOptions& options, const GroupSpec& group, double) {
                         lowrank::check_options(options);
                         const lowrank::Plan plan(options, group, 1.0);
                         return (plan.p_size() + plan.q_size() + plan.plain_size()) * sizeof(float);
                       },
                       true},
                      lowrank::options());

}  // namespace
}  // namespace topknot
