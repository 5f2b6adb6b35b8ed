// A round of libtopknot: what several compressors send goes as one message.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compress/library/handle.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

void put_length(std::vector<std::byte>& to, std::size_t length) {
  if (length > std::numeric_limits<std::uint32_t>::max())
    refuse("a tensor's message has 4 GB or more; compress it, or choose method dense");
  const auto value = static_cast<std::uint32_t>(length);
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

std::span<std::byte> summed_bytes(Message& message) {
  return message.kind == Message::Kind::sum ? std::as_writable_bytes(message.sum)
                                            : std::as_writable_bytes(message.sum_bfloat16);
}

// Adds the ranks' numbers, in rank order, over the first.
template <class Number>
void add_ranks(const std::vector<std::span<const std::byte>>& ranks, std::span<Number> sum) {
  std::memcpy(static_cast<void*>(sum.data()), ranks[0].data(), sum.size_bytes());
  std::vector<Number> other(sum.size());
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    std::memcpy(static_cast<void*>(other.data()), ranks[r].data(), sum.size_bytes());
    if constexpr (std::is_same_v<Number, float>)
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    else
      add(sum.data(), other.data(), sum.size(), sum.data());
  }
}

// Takes the next part's bytes off each rank's block.
std::vector<std::span<const std::byte>> next_bytes(std::vector<std::span<const std::byte>>& blocks) {
  std::vector<std::span<const std::byte>> bytes;
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    std::uint32_t length = 0;
    if (blocks[r].size() >= sizeof length) std::memcpy(&length, blocks[r].data(), sizeof length);
    if (blocks[r].size() < sizeof length || blocks[r].size() - sizeof length < length)
      refuse("rank " + std::to_string(r) + "'s message is cut off; did all ranks encode the same tensors?");
    bytes.push_back(blocks[r].subspan(sizeof length, length));
    blocks[r] = blocks[r].subspan(sizeof length + length);
  }
  return bytes;
}

// One part's round. Returns its next message.
std::optional<Message> decode_blocks(Part& part, Message& sent,
                                     std::vector<std::span<const std::byte>>& blocks) {
  const std::vector<std::span<const std::byte>> bytes = next_bytes(blocks);
  Round round;
  std::vector<std::vector<std::byte>> own;
  if (sent.kind == Message::Kind::block) {
    for (const auto& from : bytes) own.emplace_back(from.begin(), from.end());
    round.blocks = own;
    return part.compressor->decode(round);
  }
  for (const auto& from : bytes)
    if (from.size() != summed_bytes(sent).size()) refuse("a message has another length than this rank's");
  if (sent.kind == Message::Kind::sum)
    add_ranks(bytes, sent.sum);
  else
    add_ranks(bytes, sent.sum_bfloat16);
  round.sum = sent.sum, round.sum_bfloat16 = sent.sum_bfloat16;
  return part.compressor->decode(round);
}

std::optional<Message> decode_sum(Part& part, Message& sent, const topknot_message& all, std::size_t& at) {
  const std::size_t size = summed_bytes(sent).size();
  const auto* from = static_cast<const std::byte*>(all.sum) + at;
  if (from != summed_bytes(sent).data()) std::memcpy(summed_bytes(sent).data(), from, size);
  at += size;
  Round round;
  round.sum = sent.sum, round.sum_bfloat16 = sent.sum_bfloat16;
  return part.compressor->decode(round);
}

}  // namespace

void pack(topknot_round& round) {
  round.message = {};
  round.blocks = false;
  std::size_t sums = 0;
  Message* only = nullptr;
  for (auto& message : round.messages) {
    if (!message) continue;
    round.blocks |= message->kind == Message::Kind::block;
    ++sums;
    only = &*message;
  }
  TOPKNOT_CHECK(only, "a round without a message");
  if (round.blocks) {
    round.block.clear();
    for (auto& message : round.messages) {
      if (!message) continue;
      const bool sum = message->kind != Message::Kind::block;
      const std::span<const std::byte> bytes =
          sum ? summed_bytes(*message) : std::span<const std::byte>(message->block);
      put_length(round.block, bytes.size());
      round.block.insert(round.block.end(), bytes.begin(), bytes.end());
    }
    round.message.block = round.block.data();
    round.message.block_bytes = round.block.size();
    return;
  }
  const bool narrow = only->kind == Message::Kind::sum_bfloat16;
  round.message.sum_type = narrow ? TOPKNOT_BFLOAT16 : TOPKNOT_FLOAT32;
  if (sums == 1) {
    round.message.sum = summed_bytes(*only).data();
    round.message.sum_count = narrow ? only->sum_bfloat16.size() : only->sum.size();
    return;
  }
  round.sum.clear();
  round.sum_bfloat16.clear();
  for (auto& message : round.messages) {
    if (!message) continue;
    TOPKNOT_CHECK(narrow == (message->kind == Message::Kind::sum_bfloat16),
                  "sums of two types in one message");
    round.sum.insert(round.sum.end(), message->sum.begin(), message->sum.end());
    round.sum_bfloat16.insert(round.sum_bfloat16.end(), message->sum_bfloat16.begin(),
                              message->sum_bfloat16.end());
  }
  round.message.sum = narrow ? static_cast<void*>(round.sum_bfloat16.data()) : round.sum.data();
  round.message.sum_count = narrow ? round.sum_bfloat16.size() : round.sum.size();
}

topknot_result decode(topknot_compressor& compressor, topknot_round& round, const void* const* blocks,
                      const std::size_t* block_bytes) {
  if (round.state != TOPKNOT_MORE) refuse("the round has no message left to decode; commit or discard it");
  std::vector<std::span<const std::byte>> from;
  if (round.blocks) {
    if (!blocks || !block_bytes) refuse("the message is a block: every rank's is needed");
    for (int r = 0; r < compressor.ranks; ++r) {
      if (!blocks[r] && block_bytes[r] > 0) refuse("rank " + std::to_string(r) + "'s block is null");
      from.push_back({static_cast<const std::byte*>(blocks[r]), block_bytes[r]});
    }
  }
  round.state = TOPKNOT_INVALID;  // until all parts are through
  bool more = false;
  std::size_t at = 0;
  for (std::size_t i = 0; i < round.parts.size(); ++i) {
    std::optional<Message>& message = round.messages[i];
    if (!message) continue;
    Part& part = compressor.parts[round.parts[i]];
    message =
        round.blocks ? decode_blocks(part, *message, from) : decode_sum(part, *message, round.message, at);
    more |= message.has_value();
  }
  for (std::size_t r = 0; r < from.size(); ++r)
    if (!from[r].empty())
      refuse("rank " + std::to_string(r) + "'s message has " +
             count_text(static_cast<std::int64_t>(from[r].size()), "byte") +
             " too many; did all ranks encode the same tensors?");
  if (more) {
    pack(round);
    return round.state = TOPKNOT_MORE;
  }
  const bool finite = std::all_of(round.parts.begin(), round.parts.end(),
                                  [&](std::size_t p) { return compressor.parts[p].compressor->finite(); });
  return round.state = finite ? TOPKNOT_DONE : TOPKNOT_NOT_FINITE;
}

void end(topknot_compressor& compressor, topknot_round* round, bool discard) {
  for (const std::size_t p : round->parts) {
    Part& part = compressor.parts[p];
    if (discard) part.compressor->discard();
    if (!discard) part.before_commit = std::move(part.before_round);
    part.before_round = {};
    part.busy = false;
  }
  compressor.rounds.remove_if([&](const topknot_round& other) { return &other == round; });
}

}  // namespace topknot
