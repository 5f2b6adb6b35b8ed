#include "tools/sparsify/sparsify_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "compress/codec/codec.h"
#include "compress/sparse_step.h"
#include "dist/comm/ordered_sum.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

class FloatRanks final : public SparsifyRanks<float> {
 public:
  FloatRanks(const CompressOptions& options, const GroupSpec& group)
      : SparsifyRanks(group), name_(options.name) {
    for (int r = 0; r < group.ranks; ++r) compressors_.push_back(make_compressor(options, group));
  }

  GradientForm form() const override { return compressors_[0]->form(); }

  RanksStep<float> step(const StepInfo& info) override {
    RanksStep<float> result;
    result.ranks.resize(size());
    std::vector<Message> messages;
    for (std::size_t r = 0; r < size(); ++r) {
      RankStep<float>& rank = result.ranks[r];
      if (name_ == "dense") {  // it sends its gradient and keeps no copy
        rank.known = true;
        rank.values = memories_[r].gradient;
      }
      StepInfo own = info;
      own.rank = static_cast<int>(r);
      messages.push_back(compressors_[r]->encode({memories_[r].gradient, memories_[r].spare}, own));
      rank.count = compressors_[r]->selected();
      rank.threshold = compressors_[r]->threshold();
      rank.over_capacity = compressors_[r]->over_capacity();
    }
    while (!messages.empty()) messages = round(messages, result.ranks);

    result.committed = true;
    for (const auto& compressor : compressors_) result.committed &= compressor->finite();
    for (std::size_t r = 0; r < size(); ++r) {
      if (!result.committed) {
        compressors_[r]->discard();
        continue;
      }
      RankStep<float>& rank = result.ranks[r];
      if (const auto own = compressors_[r]->contributed()) {
        rank.known = true;
        rank.indices.assign(own->indices.begin(), own->indices.end());
        rank.values.assign(own->values.begin(), own->values.end());
      }
      result.average = settle(r, compressors_[r]->commit(Outcome{}));
    }
    return result;
  }

 private:
  std::size_t size() const { return compressors_.size(); }

  // Carries one round of messages; returns those of the next, or none.
  std::vector<Message> round(std::vector<Message>& messages, std::vector<RankStep<float>>& ranks) {
    std::vector<std::vector<std::byte>> blocks;
    std::size_t block_bytes = 0;
    for (const Message& message : messages) {
      TOPKNOT_CHECK(message.kind == messages[0].kind && message.sum.size() == messages[0].sum.size() &&
                        message.sum_bfloat16.size() == messages[0].sum_bfloat16.size(),
                    "ranks disagree on a message");
      if (message.kind == Message::Kind::block) block_bytes += message.bytes();
    }
    const bool sum = messages[0].kind != Message::Kind::block;
    for (std::size_t r = 0; r < size(); ++r) {
      const std::size_t bytes = messages[r].bytes();
      ranks[r].bytes_up += bytes;
      if (size() > 1) ranks[r].bytes_down += sum ? bytes : block_bytes - bytes;
    }
    if (messages[0].kind == Message::Kind::sum)
      add_up(messages, &Message::sum);
    else if (sum)
      add_up(messages, &Message::sum_bfloat16);
    else
      for (Message& message : messages) blocks.push_back(std::move(message.block));

    std::vector<Message> next;
    for (std::size_t r = 0; r < size(); ++r) {
      Round received;
      received.blocks = blocks;
      received.sum = messages[r].sum;
      received.sum_bfloat16 = messages[r].sum_bfloat16;
      if (auto message = compressors_[r]->decode(received)) next.push_back(std::move(*message));
    }
    TOPKNOT_CHECK(next.empty() || next.size() == size(), "ranks disagree on another round");
    return next;
  }

  // In rank order, as the collectives of compressed methods do.
  template <class T>
  static void add_up(std::vector<Message>& messages, std::span<T> Message::*sum) {
    const std::span<T> total = messages[0].*sum;
    std::vector<const T*> sources;
    for (const Message& message : messages) sources.push_back((message.*sum).data());
    ordered_sum(std::span<const T* const>(sources), total.data(), total.size());
    for (std::size_t r = 1; r < messages.size(); ++r)
      std::copy(total.begin(), total.end(), (messages[r].*sum).begin());
  }

  std::string name_;
  std::vector<std::unique_ptr<Compressor>> compressors_;
};

// Counts what values of 8 bytes would take; nothing decodes such a block.
class DoubleValues final : public ValueCodec {
 public:
  std::uint8_t id() const override { return 255; }
  bool exact() const override { return true; }
  std::size_t bytes(std::size_t count) const override { return count * sizeof(double); }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    out.resize(out.size() + bytes(values.size()));
  }
  void decode(std::span<const std::byte>, std::span<float>) const override {
    throw Error("blocks of doubles are only counted");
  }
};

class DoubleRanks final : public SparsifyRanks<double> {
 public:
  DoubleRanks(const SparsePreset& parts, const CompressOptions& options, const GroupSpec& group)
      : SparsifyRanks(group), numel_(group.numel), index_codec_(index_codecs().find(parts.codec)(options)) {
    for (int r = 0; r < group.ranks; ++r)
      steps_.push_back(std::make_unique<SparseStep<double>>(parts, options, group));
  }

  GradientForm form() const override { return steps_[0]->form(); }

  RanksStep<double> step(const StepInfo& info) override {
    RanksStep<double> result;
    result.committed = true;
    result.ranks.resize(steps_.size());
    std::vector<Entries<double>> sent;
    std::size_t all_bytes = 0;
    for (std::size_t r = 0; r < steps_.size(); ++r) {
      StepInfo own = info;
      own.rank = static_cast<int>(r);
      sent.push_back(steps_[r]->encode(memories_[r].gradient, memories_[r].spare, own));
      result.committed &= sent[r].finite;
      RankStep<double>& rank = result.ranks[r];
      rank.count = sent[r].indices.size();
      rank.threshold = steps_[r]->threshold();
      rank.over_capacity = steps_[r]->over_capacity();
      rank.bytes_up = block_bytes(sent[r]);
      all_bytes += rank.bytes_up;
    }
    result.committed = result.committed && steps_[0]->summable(sent);
    for (auto& rank : result.ranks) rank.bytes_down = all_bytes - rank.bytes_up;
    for (std::size_t r = 0; r < steps_.size(); ++r) {
      if (result.committed)
        result.average = settle(r, steps_[r]->commit(sent, Outcome{}));
      else
        steps_[r]->discard();
    }
    for (std::size_t r = 0; r < steps_.size() && result.committed; ++r) {
      result.ranks[r].known = true;
      result.ranks[r].indices = std::move(sent[r].indices);
      result.ranks[r].values = std::move(sent[r].values);
    }
    return result;
  }

 private:
  std::size_t block_bytes(const Entries<double>& entries) const {
    Entries<float> counted;
    counted.finite = entries.finite;
    counted.indices = entries.indices;
    counted.values.resize(entries.values.size());
    return write_block(counted, numel_, *index_codec_, DoubleValues()).size();
  }

  std::size_t numel_ = 0;
  std::unique_ptr<IndexCodec> index_codec_;
  std::vector<std::unique_ptr<SparseStep<double>>> steps_;
};

}  // namespace

template <class T>
SparsifyRanks<T>::SparsifyRanks(const GroupSpec& group) : memories_(static_cast<std::size_t>(group.ranks)) {
  for (Memories& memories : memories_) {
    memories.gradient.resize(group.numel);
    memories.spare.resize(group.numel);
  }
}

template <class T>
std::span<const T> SparsifyRanks<T>::settle(std::size_t rank, std::span<T> average) {
  Memories& own = memories_[rank];
  if (average.data() == own.spare.data()) std::swap(own.gradient, own.spare);
  TOPKNOT_CHECK(average.data() == own.gradient.data() && average.size() == own.gradient.size(),
                "the average is in neither memory");
  const std::vector<T>& first = memories_[0].gradient;
  TOPKNOT_CHECK(first.empty() || std::memcmp(first.data(), average.data(), average.size_bytes()) == 0,
                "ranks disagree on the average");
  return average;
}

template class SparsifyRanks<float>;
template class SparsifyRanks<double>;

std::unique_ptr<SparsifyRanks<float>> make_float_ranks(const CompressOptions& options,
                                                       const GroupSpec& group) {
  return std::make_unique<FloatRanks>(options, group);
}

std::unique_ptr<SparsifyRanks<double>> make_double_ranks(const CompressOptions& options,
                                                         const GroupSpec& group) {
  compressors().find(options.name);  // a wrong name is met first, with a suggestion
  if (!sparse_presets().contains(options.name)) {
    std::string names;
    for (const std::string& name : sparse_presets().names()) names += (names.empty() ? "" : ", ") + name;
    throw UserError(
        "--precision float64: " + options.name +
        " computes and sends 32-bit floats, so there is no float64 form of it; these have one: " + names);
  }
  const SparsePreset parts = resolve(sparse_presets().find(options.name), options);
  if (!value_codecs().find(parts.values)(options)->exact())
    throw UserError("--precision float64: compress.values: " + parts.values +
                    " rounds what is sent, and float64 is for results to the last digit; leave the key out");
  return std::make_unique<DoubleRanks>(parts, options, group);
}

}  // namespace topknot
