// A round of libtopknot: what several compressors send goes as one message.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
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
  if (sent.kind == Message::Kind::block) {
    round.blocks = bytes;
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

struct HostRound : RoundMemory {
  std::vector<std::byte> block;  // each part's after its length
  std::vector<std::byte> sum;    // of several parts
};

class Host final : public Place {
 public:
  std::unique_ptr<Compressor> make_compressor(const CompressOptions& options,
                                              const GroupSpec& group) const override {
    return topknot::make_compressor(options, group);
  }
  // Pages from calloc() take no memory before they are written.
  Floats zeros(std::size_t count) const override {
    const std::shared_ptr<void> memory(std::calloc(count + 16, sizeof(float)), std::free);
    if (!memory) throw std::bad_alloc();
    const std::uintptr_t address =
        (reinterpret_cast<std::uintptr_t>(memory.get()) + 63) & ~std::uintptr_t{63};
    return {std::shared_ptr<float>(memory, reinterpret_cast<float*>(address)), count};
  }
  void copy(const float* from, float* to, std::size_t count) const override { std::copy_n(from, count, to); }
  void read(const void* from, topknot_type type, float scale, std::span<float> to) const override {
    read_values(from, type, scale, to);
  }
  void write(std::span<const float> from, float scale, topknot_type type, void* to) const override {
    write_values(from, scale, type, to);
  }
  StepContext begin(topknot_round& round, const StepContext& context) override {
    round.memory = std::make_shared<HostRound>();
    return context;
  }
  void pack(topknot_round& round) override;
  void decode(topknot_round& round, std::span<const std::span<const std::byte>> blocks) override;
  bool finite(const topknot_round& round) const override {
    return std::all_of(round.parts.begin(), round.parts.end(),
                       [&](std::size_t p) { return round.owner->parts[p].compressor->finite(); });
  }
  void discard(Part& part, topknot_round&) override { part.compressor->discard(); }
};

void Host::pack(topknot_round& round) {
  auto& memory = static_cast<HostRound&>(*round.memory);
  memory.block.clear(), memory.sum.clear();
  if (round.blocks) {
    for (std::size_t piece = 0; piece < std::max<std::size_t>(round.pieces, 1); ++piece)
      for (auto& message : round.messages) {
        if (!message) continue;
        const bool sum = message->kind != Message::Kind::block;
        std::span<const std::byte> bytes =
            sum ? summed_bytes(*message) : std::span<const std::byte>(message->block);
        if (message->pieces > 0)
          bytes = bytes.subspan(piece * (bytes.size() / round.pieces), bytes.size() / round.pieces);
        put_length(memory.block, bytes.size());
        memory.block.insert(memory.block.end(), bytes.begin(), bytes.end());
      }
    round.message.block = memory.block.data(), round.message.block_bytes = memory.block.size();
    return;
  }
  std::vector<std::span<std::byte>> sums;
  for (auto& message : round.messages)
    if (message) sums.push_back(summed_bytes(*message));
  if (sums.size() > 1)
    for (const std::span<std::byte> bytes : sums)
      memory.sum.insert(memory.sum.end(), bytes.begin(), bytes.end());
  round.message.sum = sums.size() > 1 ? memory.sum.data() : sums[0].data();
}

void Host::decode(topknot_round& round, std::span<const std::span<const std::byte>> blocks) {
  std::vector<std::span<const std::byte>> from(blocks.begin(), blocks.end());
  const std::size_t whole = round.message.block_bytes;
  for (std::span<const std::byte>& block : from)
    if (round.pieces > 1 && block.size() == whole)
      block = block.subspan(static_cast<std::size_t>(round.owner->rank) * (whole / round.pieces),
                            whole / round.pieces);
  std::size_t at = 0;
  for (std::size_t i = 0; i < round.parts.size(); ++i) {
    std::optional<Message>& message = round.messages[i];
    if (!message) continue;
    Part& part = round.owner->parts[round.parts[i]];
    message =
        round.blocks ? decode_blocks(part, *message, from) : decode_sum(part, *message, round.message, at);
  }
  for (std::size_t r = 0; r < from.size(); ++r)
    if (!from[r].empty())
      refuse("rank " + std::to_string(r) + "'s message has " +
             count_text(static_cast<std::int64_t>(from[r].size()), "byte") +
             " too many; did all ranks encode the same tensors?");
}

}  // namespace

std::unique_ptr<Place> make_host() {
  return std::make_unique<Host>();
}

void pack(topknot_round& round) {
  round.message = {};
  round.blocks = false, round.pieces = 0;
  std::size_t bytes = 0, sums = 0, narrow = 0;
  for (const auto& message : round.messages) {
    if (!message) continue;
    const Message::Kind kind = message->kind;
    const bool sum = kind == Message::Kind::sum || kind == Message::Kind::sum_bfloat16;
    round.blocks |= !sum;
    round.pieces = std::max(round.pieces, static_cast<std::size_t>(message->pieces));
    if (!sum) continue;
    ++sums;
    narrow += kind == Message::Kind::sum_bfloat16;
    bytes += message->bytes();
  }
  TOPKNOT_CHECK(round.blocks || sums > 0, "a round without a message");
  if (!round.blocks) {
    TOPKNOT_CHECK(narrow == 0 || narrow == sums, "sums of two types in one message");
    round.message.sum_type = narrow > 0 ? TOPKNOT_BFLOAT16 : TOPKNOT_FLOAT32;
    round.message.sum_count = bytes / (narrow > 0 ? sizeof(BFloat16) : sizeof(float));
  }
  round.owner->place->pack(round);
}

topknot_result decode(topknot_round& round, const void* const* blocks, const std::size_t* block_bytes) {
  if (round.state != TOPKNOT_MORE) refuse("the round has no message left to decode; commit or discard it");
  std::vector<std::span<const std::byte>> from;
  if (round.blocks) {
    if (!blocks || !block_bytes) refuse("the message is a block: every rank's is needed");
    for (int r = 0; r < round.owner->ranks; ++r) {
      if (!blocks[r] && block_bytes[r] > 0) refuse("rank " + std::to_string(r) + "'s block is null");
      from.push_back({static_cast<const std::byte*>(blocks[r]), block_bytes[r]});
    }
  }
  round.state = TOPKNOT_INVALID;  // until all parts are through
  round.owner->place->decode(round, from);
  if (std::any_of(round.messages.begin(), round.messages.end(),
                  [](const auto& m) { return m.has_value(); })) {
    pack(round);
    return round.state = TOPKNOT_MORE;
  }
  return round.state = round.owner->place->finite(round) ? TOPKNOT_DONE : TOPKNOT_NOT_FINITE;
}

void end(topknot_compressor& compressor, topknot_round* round, bool discard) {
  for (const std::size_t p : round->parts) {
    Part& part = compressor.parts[p];
    if (discard) compressor.place->discard(part, *round);
    if (!discard) part.before_commit = std::move(part.before_round);
    part.before_round = {};
    part.busy = false;
  }
  compressor.rounds.remove_if([&](const topknot_round& other) { return &other == round; });
}

}  // namespace topknot
