// ACP-SGD: Zhang, Zhang, Shi, Chu, Li, "Evaluation and optimization of gradient compression for distributed
// deep learning", ICDCS 2023. PowerSGD with one factor, one sum, per step: M = gradient + residual,
//
//   even steps (the first is 0): Q = an orthonormal basis of the last Q; P = M Q, summed
//   odd steps:                   P = an orthonormal basis of the last P; Q = M^T P, summed
//   average = P Q^T with the sum / ranks; residual = M - P Q^T with the rank's own factor
//
// The first Q is Gaussian, the same on all ranks (in the authors' code it is drawn without a common seed; a
// comment there asks for one). That code approximates every tensor that has columns; here those that would
// shrink by less than compress.min_compression are sent uncompressed, where a matrix shrinks by numel / (rank
// (rows + cols) / 2). At full rank it equals the dense average only for square matrices: elsewhere the larger
// side's basis, from the step before, does not span all of M. With aggregation weights w the sum is of w P or
// w Q, so that sum(w residual) + ranks * average = sum(w M).

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "compress/compressor.h"
#include "compress/lowrank/plan.h"
#include "compress/parallel.h"
#include "compress/state.h"

namespace topknot {
namespace {

class AcpSgd final : public lowrank::LowRankCompressor {
 public:
  AcpSgd(const CompressOptions& options, const GroupSpec& group)
      : LowRankCompressor(options, group, 0.5), last_(plan_.q_size()) {
    plan_.draw_q(last_);
  }

 private:
  void project(std::span<const float> u) override {
    basis_ = last_;
    last_.reserve(factor_size(sends_p_));  // for rebuild()
    own_.resize(factor_size(sends_p_));
    if (sends_p_) {
      plan_.orthonormalise_q(basis_);
      plan_.product(u, basis_, own_);
    } else {
      plan_.orthonormalise_p(basis_);
      plan_.transposed_product(u, basis_, own_);
    }
    sum_.assign(own_.begin(), own_.end());
    sum_.resize(own_.size() + plan_.plain_size());
    sent_ = sum_.size();
    plan_.copy_plain(u, plain());
    multiply_all(sum_, weights_[rank_]);
    // A rank's own product could overflow with such a factor, which the others must learn.
    if (!lowrank::within(own_, plan_.bound())) sum_[0] = std::numeric_limits<float>::infinity();
  }

  std::optional<Message> receive(const Round& round) override {
    check_sum(round, sum_);
    finite_ = lowrank::within(factor(), plan_.bound()) &&
              lowrank::within(plain(), std::numeric_limits<float>::max());
    return std::nullopt;
  }

  void rebuild(std::span<float> u, std::span<float> average) override {
    multiply_all(sum_, 1.0f / static_cast<float>(ranks_));
    using Factors = lowrank::Plan::Factors;
    if (sends_p_)
      plan_.rebuild(u, average, has_residual_, Factors{own_, basis_}, Factors{factor(), basis_}, plain());
    else
      plan_.rebuild(u, average, has_residual_, Factors{basis_, own_}, Factors{basis_, factor()}, plain());
    last_.assign(factor().begin(), factor().end());
    sends_p_ = !sends_p_;
  }

  std::size_t factor_size(bool p) const { return p ? plan_.p_size() : plan_.q_size(); }
  std::span<float> factor() { return std::span(sum_).first(own_.size()); }
  std::span<float> plain() { return std::span(sum_).subspan(own_.size()); }

  void save(StateWriter& writer) const override {
    check_idle("state is saved between steps");
    writer.put<std::uint8_t>(sends_p_ ? 1 : 0);
    writer.put_list(last_);
  }
  void load(StateReader& reader) override {
    check_idle("state is loaded between steps");
    const auto turn = reader.get<std::uint8_t>();
    if (turn > 1) StateReader::fail("names a factor other than P and Q");
    sends_p_ = turn == 1;
    last_ = lowrank::load_factor(reader, factor_size(!sends_p_));
  }

  bool sends_p_ = true;      // whether the next step sends P
  std::vector<float> last_;  // the factor that the last committed step averaged, Q at first
  std::vector<float> basis_, own_;
};

const bool acpsgd_registered =
    compressors().add("acpsgd", "low-rank factors P and Q in turn, one sum per step",
                      {make_as<Compressor, AcpSgd>,
                       [](const CompressOptions& options, const GroupSpec& group, double) {
                         lowrank::check_options(options);
                         const lowrank::Plan plan(options, group, 0.5);
                         // The mean of even and odd steps, rounded up.
                         return ((plan.p_size() + plan.q_size() + 1) / 2 + plan.plain_size()) * sizeof(float);
                       },
                       true},
                      lowrank::options());

}  // namespace
}  // namespace topknot
