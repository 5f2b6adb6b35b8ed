// The parts of a compressor of libtopknot, and their state.
#include <limits>
#include <optional>

#include "compress/library/handle.h"
#include "compress/state.h"

namespace topknot {
namespace {

constexpr std::uint32_t kStateMagic = 0x53544B54, kStateVersion = 1;  // "TKTS"

// Sets what a method does with the residual's memory: a round of it, by one rank, shows.
void find_residual(Part& part) {
  GroupSpec spec{16, {{0, 16}}, 1};
  spec.tensors = {{0, 4, 4}};
  std::vector<float> gradient(16, 1.0f), residual(16);
  const std::unique_ptr<Compressor> compressor = make_compressor(part.options, spec);
  std::optional<Message> message = compressor->encode({gradient, residual}, {});
  while (message) {
    Round round;
    const std::vector<std::span<const std::byte>> blocks = {message->block};
    round.blocks = blocks, round.sum = message->sum, round.sum_bfloat16 = message->sum_bfloat16;
    message = compressor->decode(round);
  }
  part.has_residual = compressor->commit({}).data() == residual.data();
  part.keeps_memory = part.has_residual || residual != std::vector<float>(16);
}

}  // namespace

void make_parts(topknot_compressor& compressor) {
  const LibrarySettings& settings = compressor.settings;
  CompressOptions dense;
  std::optional<std::size_t> joint;  // with scope=model the part of all that are compressed
  for (Tensor& tensor : compressor.tensors) {
    const bool as_it_is = !sums_plainly(settings.options.name, settings.options.values) &&
                          ((settings.dense_1d && tensor.shape.size() <= 1) ||
                           tensor.numel < static_cast<std::size_t>(settings.min_numel));
    const bool joins = settings.whole && !as_it_is;
    tensor.part = joins && joint ? *joint : compressor.parts.size();
    if (tensor.part == compressor.parts.size()) compressor.parts.emplace_back();
    if (joins) joint = tensor.part;
    Part& part = compressor.parts[tensor.part];
    tensor.offset = part.spec.numel;
    part.options = as_it_is ? dense : settings.options;
    const std::size_t rows =
        tensor.shape.size() > 1 ? static_cast<std::size_t>(tensor.shape[0]) : tensor.numel;
    part.spec.tensors.push_back({tensor.offset, rows, tensor.numel / rows});
    part.spec.numel += tensor.numel;
    if (part.spec.numel > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
      refuse("scope=model: the tensors have more than 2^31 - 1 elements together; use scope=tensor");
  }
  std::size_t arena = 0;
  for (Part& part : compressor.parts) {
    part.spec.segments = {{0, part.spec.numel}};
    part.spec.ranks = compressor.ranks;
    part.spec.offset = arena;
    arena += part.spec.numel;
    part.compressor = compressor.place->make_compressor(part.options, part.spec);
    find_residual(part);
    part.gradient = compressor.place->zeros(part.spec.numel);
    part.residual = compressor.place->zeros(part.spec.numel);
  }
}

void require_no_round(const topknot_compressor& compressor) {
  if (!compressor.rounds.empty()) refuse("a round is under way; commit or discard it first");
}

std::unique_ptr<Compressor> renewed(const Place& place, const Part& part, std::span<const std::byte> state) {
  std::unique_ptr<Compressor> fresh = place.make_compressor(part.options, part.spec);
  fresh->load_state(state);
  return fresh;
}

void undo(topknot_compressor& compressor, std::int64_t step) {
  std::vector<std::unique_ptr<Compressor>> all;  // by part; null: it stays
  for (const Part& part : compressor.parts)
    all.push_back(part.before_commit.step == step ? renewed(*compressor.place, part, part.before_commit.state)
                                                  : nullptr);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i]) continue;
    Part& part = compressor.parts[i];
    part.compressor = std::move(all[i]), part.reserved = 0;
    if (part.keeps_memory) part.residual = std::move(part.before_commit.residual);
    part.before_commit = {};
  }
}

std::vector<std::byte> saved(const topknot_compressor& compressor) {
  StateWriter writer;
  writer.put(kStateMagic);
  writer.put(kStateVersion);
  writer.put(static_cast<std::int32_t>(compressor.ranks));
  writer.put_list(compressor.settings.options.name);
  writer.put_list(compressor.settings.carried);
  writer.put<std::uint64_t>(compressor.tensors.size());
  for (const Tensor& tensor : compressor.tensors) {
    writer.put_list(tensor.name);
    writer.put_list(tensor.shape);
  }
  for (const Part& part : compressor.parts) {
    std::vector<float> residual(part.keeps_memory ? part.spec.numel : 0);
    compressor.place->copy(part.residual.span().data(), residual.data(), residual.size());
    writer.put_list(residual);
    writer.put_list(part.compressor->state());
  }
  return writer.take();
}

void load(topknot_compressor& compressor, std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto text = [&] {
    const std::vector<char> characters = reader.get_list<char>();
    return std::string(characters.begin(), characters.end());
  };
  if (reader.get<std::uint32_t>() != kStateMagic) refuse("this is no state that topknot_save() wrote");
  if (const auto version = reader.get<std::uint32_t>(); version != kStateVersion)
    refuse("a state of version " + std::to_string(version) + ", not " + std::to_string(kStateVersion));
  if (const auto ranks = reader.get<std::int32_t>(); ranks != compressor.ranks)
    refuse("a state of one of " + std::to_string(ranks) + " ranks, not of " +
           std::to_string(compressor.ranks));
  if (const std::string method = text(); method != compressor.settings.options.name)
    refuse("a state of method '" + method + "', not '" + compressor.settings.options.name + "'");
  if (const std::string keys = text(); keys != compressor.settings.carried)
    refuse("a state of keys '" + keys + "', not '" + compressor.settings.carried + "'");
  if (reader.get<std::uint64_t>() != compressor.tensors.size())
    refuse("a state of another number of tensors");
  for (const Tensor& tensor : compressor.tensors) {
    const std::string name = text();
    if (name != tensor.name)
      refuse("the state has tensor '" + name + "' in the place of '" + tensor.name + "'");
    if (reader.get_list<std::int64_t>() != tensor.shape)
      refuse("the state's tensor '" + name + "' has another shape");
  }
  struct Loaded {
    std::unique_ptr<Compressor> compressor;
    std::vector<float> residual;
  };
  std::vector<Loaded> all;
  for (const Part& part : compressor.parts) {
    Loaded loaded;
    loaded.residual = reader.get_finite_list<float>();
    if (loaded.residual.size() != (part.keeps_memory ? part.spec.numel : 0))
      StateReader::fail("has a residual of another length");
    loaded.compressor = renewed(*compressor.place, part, reader.get_list<std::byte>());
    loaded.residual.resize(part.spec.numel);
    all.push_back(std::move(loaded));
  }
  reader.finish();
  for (std::size_t i = 0; i < all.size(); ++i) {
    Part& part = compressor.parts[i];
    part.compressor = std::move(all[i].compressor), part.reserved = 0;
    part.before_commit = {};
    compressor.place->copy(all[i].residual.data(), part.residual.span().data(), part.spec.numel);
  }
}

}  // namespace topknot
