#include "tools/sparsify/sparsify_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dist/comm/ordered_sum.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

// In rank order, as the collectives of compressed methods do.
template <class T>
void add_up(std::vector<Message>& messages, std::span<T> Message::*sum) {
  const std::span<T> total = messages[0].*sum;
  std::vector<const T*> sources;
  for (const Message& message : messages) sources.push_back((message.*sum).data());
  ordered_sum(std::span<const T* const>(sources), total.data(), total.size());
  for (std::size_t r = 1; r < messages.size(); ++r)
    std::copy(total.begin(), total.end(), (messages[r].*sum).begin());
}

}  // namespace

SparsifyRanks::SparsifyRanks(const CompressOptions& options, const GroupSpec& group) : name_(options.name) {
  for (int r = 0; r < group.ranks; ++r) {
    compressors_.push_back(make_compressor(options, group));
    memories_.push_back({std::vector<float>(group.numel), std::vector<float>(group.numel)});
  }
}

RanksStep SparsifyRanks::step(const StepContext& info) {
  RanksStep result;
  result.ranks.resize(size());
  std::vector<Message> messages;
  for (std::size_t r = 0; r < size(); ++r) {
    RankStep& rank = result.ranks[r];
    if (name_ == "dense") {  // it sends its gradient and keeps no copy
      rank.known = true;
      rank.values = memories_[r].gradient;
    }
    StepContext own = info;
    own.rank = static_cast<int>(r);
    messages.push_back(compressors_[r]->encode({memories_[r].gradient, memories_[r].residual}, own));
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
    RankStep& rank = result.ranks[r];
    if (const auto own = compressors_[r]->contributed()) {
      rank.known = true;
      rank.indices.assign(own->indices.begin(), own->indices.end());
      rank.values.assign(own->values.begin(), own->values.end());
    }
    result.average = settle(r, compressors_[r]->commit({}));
  }
  return result;
}

std::vector<Message> SparsifyRanks::round(std::vector<Message>& messages, std::vector<RankStep>& ranks) {
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

std::span<const float> SparsifyRanks::settle(std::size_t rank, std::span<float> average) {
  Memories& own = memories_[rank];
  if (average.data() == own.residual.data()) std::swap(own.gradient, own.residual);
  TOPKNOT_CHECK(average.data() == own.gradient.data() && average.size() == own.gradient.size(),
                "the average is in neither memory");
  const std::vector<float>& first = memories_[0].gradient;
  TOPKNOT_CHECK(first.empty() || std::memcmp(first.data(), average.data(), average.size_bytes()) == 0,
                "ranks disagree on the average");
  return average;
}

}  // namespace topknot
