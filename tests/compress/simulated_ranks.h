#pragma once
// Ranks in one thread: drives compressors through a step as the exchange does, with the two memories of each
// rank.
#include "compress/compressor.h"
#include "tests/compress/fixtures.h"

namespace topknot::testing {

struct SimulatedRank {
  std::unique_ptr<Compressor> compressor;
  std::vector<float> gradient, residual;  // what a slice has
  std::span<float> average;
  std::vector<std::uint32_t> rejected;  // positions that the collective does not accept
};

class SimulatedRanks {
 public:
  SimulatedRanks(const CompressOptions& options, const GroupSpec& spec) {
    for (int r = 0; r < spec.ranks; ++r) add(make_compressor(options, spec), spec.numel);
  }
  explicit SimulatedRanks(std::vector<std::unique_ptr<Compressor>> compressors, std::size_t numel) {
    for (auto& compressor : compressors) add(std::move(compressor), numel);
  }

  SimulatedRank& operator[](std::size_t r) { return ranks_[r]; }
  std::size_t size() const { return ranks_.size(); }

  // The gradients are in place. Returns whether the step was committed; the averages are then set, and the
  // residuals are in `residual` of each rank.
  bool step(std::int64_t number, double density, std::vector<float> weights = {}, bool agree = true,
            double lr = 1) {
    std::vector<Message> messages;
    for (std::size_t r = 0; r < size(); ++r) {
      const StepContext info{
          .step = number, .density = density, .weights = weights, .rank = int(r), .lr = lr};
      messages.push_back(ranks_[r].compressor->encode({ranks_[r].gradient, ranks_[r].residual}, info));
    }
    sent_.clear();
    for (const Message& message : messages)
      if (message.entries) sent_.push_back(*message.entries);
    blocks_.clear();
    for (bool more = true; more;) {
      if (messages[0].kind == Message::Kind::sum) sum(messages);
      std::vector<std::vector<std::byte>> blocks;
      for (Message& message : messages) blocks.push_back(message.block);
      if (blocks_.empty()) blocks_ = blocks;
      std::vector<Message> next;
      for (std::size_t r = 0; r < size(); ++r) {
        Round round;
        std::vector<std::vector<std::byte>> pieces;
        if (const int count = messages[0].pieces; count > 0)
          for (const auto& block : blocks) {
            const std::size_t size = block.size() / std::size_t(count);
            pieces.emplace_back(block.data() + r * size, block.data() + (r + 1) * size);
          }
        const auto views = views_of(pieces.empty() ? blocks : pieces);
        round.blocks = views;
        round.sum = messages[r].sum;
        if (auto message = ranks_[r].compressor->decode(round)) next.push_back(std::move(*message));
      }
      TOPKNOT_CHECK(next.empty() || next.size() == size(), "ranks disagree on another round");
      more = !next.empty();
      messages = std::move(next);
    }
    for (const SimulatedRank& rank : ranks_) agree = agree && rank.compressor->finite();
    for (SimulatedRank& rank : ranks_) {
      if (!agree) {
        rank.compressor->discard();
        continue;
      }
      const std::span<float> average = rank.compressor->commit(rank.rejected);
      if (average.data() == rank.residual.data()) std::swap(rank.gradient, rank.residual);
      rank.average = rank.gradient;
      TOPKNOT_CHECK(average.data() == rank.gradient.data(), "the average is in neither memory");
      TOPKNOT_CHECK(same_bits(rank.gradient, ranks_[0].gradient), "ranks with different averages");
    }
    return agree;
  }

  // What the ranks sent, where the method sends entries, unrounded.
  const std::vector<SparseVector>& sent() const { return sent_; }
  const std::vector<std::vector<std::byte>>& blocks() const { return blocks_; }  // of the first round

 private:
  void add(std::unique_ptr<Compressor> compressor, std::size_t numel) {
    ranks_.push_back({std::move(compressor), std::vector<float>(numel), std::vector<float>(numel), {}, {}});
  }
  // In rank order, as a collective does.
  static void sum(std::vector<Message>& messages) {
    std::vector<float> total(messages[0].sum.begin(), messages[0].sum.end());
    for (std::size_t r = 1; r < messages.size(); ++r)
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += messages[r].sum[i];
    for (Message& message : messages) std::copy(total.begin(), total.end(), message.sum.begin());
  }

  std::vector<SimulatedRank> ranks_;
  std::vector<SparseVector> sent_;
  std::vector<std::vector<std::byte>> blocks_;
};

inline GroupSpec whole_group(std::size_t numel, int ranks) {
  return {numel, {{0, numel}}, ranks};
}

// With more of the keys of section `compress`, as a user writes them: "memory=none", "levels=2".
inline CompressOptions with(CompressOptions options, const std::vector<std::string>& keys) {
  const std::map<std::string, std::string*> texts = {
      {"select", &options.select}, {"memory", &options.memory},       {"codec", &options.codec},
      {"values", &options.values}, {"aggregate", &options.aggregate}, {"transform", &options.transform}};
  for (const std::string& key : keys) {
    const std::size_t at = key.find('=');
    const std::string name = key.substr(0, at), value = key.substr(at + 1);
    const auto number = [&] { return std::stod(value); };
    if (texts.contains(name))
      *texts.at(name) = value;
    else if (name == "feedback_decay")
      options.feedback_decay = number();
    else if (name == "capacity")
      options.capacity = number();
    else if (name == "momentum")
      options.momentum = number();
    else if (name == "seed")
      options.seed = std::stoull(value);
    else if (name == "lr_inside")
      options.lr_inside = value == "true";
    else if (name == "nesterov")
      options.nesterov = value == "true";
    else if (value == "true" || value == "false")
      options.set(name, value == "true");
    else if (value.find_first_not_of("-.0123456789e") != std::string::npos)
      options.set(name, value);
    else if (value.find_first_of(".e") == std::string::npos)
      options.set(name, std::stoi(value));
    else
      options.set(name, number());
  }
  return options;
}
inline CompressOptions named(const std::string& name, const std::vector<std::string>& keys = {}) {
  CompressOptions options;
  options.name = name;
  return with(options, keys);
}

// One step of each with the same gradients, `gradient(rank)`.
template <class Gradient>
void step_alike(std::initializer_list<SimulatedRanks*> all, const Gradient& gradient, std::int64_t number,
                double density, const std::vector<float>& weights = {}) {
  for (SimulatedRanks* ranks : all) {
    for (std::size_t r = 0; r < ranks->size(); ++r) (*ranks)[r].gradient = gradient(r);
    REQUIRE(ranks->step(number, density, weights));
  }
}

}  // namespace topknot::testing
